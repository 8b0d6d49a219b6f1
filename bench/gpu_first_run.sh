#!/usr/bin/env bash
# The first run of torchring on a machine with GPUs, the most telling parts first. Takes about 40 minutes:
#
#     bash bench/gpu_first_run.sh FOLDER                every part
#     bash bench/gpu_first_run.sh FOLDER facts smoke    some parts
#
# Parts, with the minute at which each begins at the latest:
#      0 facts       the machine, its links, versions, and what torchring makes of it
#      2 smoke       one test of each way through the GPU path; ends at the first failure
#      4 tests       tests of training
#      9 streams     ranks as streams of one GPU: is the order of memory right, and what do meetings take
#     11 steps       overhead, peak memory and host time: what decides what to build next
#     17 kernels     tests of the kernels
#     24 rates       kernels against a copy
#     27 overlap     one profiled step, with ring and with direct
#     29 sanitizer   tests of the kernels in which no kernel waits, under compute-sanitizer
#     35 ncu, ncu_direct    profiles of pack and unpack, and of direct with one rank
#     37 allreduce   between processes
#
# FOLDER gets the output of each part, the benchmarks' rows in rows.jsonl, and summary.txt. Each part has a time limit
# below ten minutes, needs no other part, and the next part starts even if a part failed. The exit code is the number of
# parts that failed. Needs a checkout, with PyTorch, Triton, numpy and pytest; torchring need not be installed. PYTHON
# says which Python to use (default: python3).
set -u
out=$(realpath -m "${1:?usage: bash bench/gpu_first_run.sh FOLDER [PART...]}")
wanted=" ${*:2} "
mkdir -p "$out"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TORCHRING_EXPECT_GPU=1
python=${PYTHON:-python3}
failed=0

# part NAME SECONDS COMMAND...: runs the command, with its output in FOLDER/NAME.log
part() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    [ -n "${wanted// /}" ] && [[ $wanted != *" $name "* ]] && return
    echo "== $name: $*" | cut -c -120
    timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    tail -n 4 "$out/$name.log"
    { [ $code -eq 124 ] || [ $code -eq 137 ]; } && echo "stopped after $limit s, its limit" | tee -a "$out/$name.log"
    [ $code -ne 0 ] && failed=$((failed + 1))
    echo "$name: exit code $code after $((SECONDS - began)) s" | tee -a "$out/summary.txt"
}

facts='
import inspect, torch, triton, torch.distributed._symmetric_memory as symmetric
print("torch", torch.__version__, "triton", triton.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version())
count = torch.cuda.device_count()
for one in range(count):
    reached = [other for other in range(count) if other != one and torch.cuda.can_device_access_peer(one, other)]
    print(one, torch.cuda.get_device_properties(one), "reaches", reached)
memory, kind = torch._C._distributed_c10d._SymmetricMemory, torch._C._autograd.DeviceType.CUDA
print("multicast", memory.has_multicast_support(kind, 0))
print(inspect.getsource(symmetric.empty)[-700:])
'
machine="nvidia-smi; nvidia-smi topo -m; nvidia-smi -q -d CLOCK,POWER; cc --version; python3-config --includes
df -h /dev/shm; ulimit -l; $python -m pip list; $python -m torchring doctor"
mapfile -t training < <(grep -rl 'mark\.gpu' tests --include='test_*.py' --exclude-dir=kernels)
tests=("$python" -m pytest -m gpu -p no:cacheprovider --durations 10)
smoke='(sums_are_exact and direct and 2) or no_step_waits or ring_of_one or nccl_engine_alone or (between_streams and 2)'
bench=("$python" -m torchring.bench.gpu --json "$out/rows.jsonl" --sections)
overlap=("$python" bench/overlap.py --json "$out/rows.jsonl" --trace)
unwaiting='worked_example or spoils_nothing or pack or unpack or accumulate'
profiled=(ncu --set full --clock-control none --launch-count 6 --kernel-name)
worker=("$python" -m torchring.bench.gpu --worker)

[ -n "${wanted// /}" ] || : >"$out/summary.txt"
part facts 120 bash -c "$machine; exec $python -c '$facts'"
part smoke 120 "${tests[@]}" -x "${training[@]}" tests/kernels/test_direct.py -k "$smoke"
part tests 300 "${tests[@]}" --maxfail=4 -o timeout=150 -v "${training[@]}"
part streams 130 "${bench[@]}" streams
part steps 290 "${bench[@]}" step bucket copy
part kernels 420 "${tests[@]}" --maxfail=6 tests/kernels
part rates 160 "${bench[@]}" kernels
part overlap 120 bash -c '"$@" "$0/ring.json" --algorithm ring && "$@" "$0/direct.json" --algorithm direct' \
    "$out" "${overlap[@]}"
part sanitizer 360 bash -c 'for tool in memcheck racecheck synccheck; do compute-sanitizer --tool $tool \
    --target-processes all --error-exitcode 9 "$@" || exit; done' sanitizer "${tests[@]}" tests/kernels -k "$unwaiting"
part ncu 75 "${profiled[@]}" 'regex:_(un)?pack_kernel' "${worker[@]}" "kernels,none,$out/ncu.jsonl"
part ncu_direct 75 "${profiled[@]}" _direct_kernel "${worker[@]}" "bucket,none,$out/ncu.jsonl"
part allreduce 290 "${bench[@]}" allreduce
echo "Results are in $out:"
cat "$out/summary.txt"
exit "$failed"
