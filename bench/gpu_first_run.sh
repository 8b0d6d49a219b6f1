#!/usr/bin/env bash
# The first run of torchring on a machine with GPUs, the most telling parts first:
#
#     bash bench/gpu_first_run.sh FOLDER                everything, in about half an hour
#     bash bench/gpu_first_run.sh FOLDER 1              the first of four runs of at most ten minutes each: 1, 2, 3, 4
#     bash bench/gpu_first_run.sh FOLDER facts smoke    some parts
#
#   1 facts       the machine, its links, versions, and what torchring makes of it
#     doctor      a model trains by each all-reduce as in one process
#     smoke       one test of each way through the GPU path; ends at the first failure
#     tests       tests of training
#   2 steps       overhead, peak memory and host time: what decides what to build next
#     kernels     tests of the kernels
#   3 rates       kernels against a copy
#     sanitizer   tests of the kernels in which no kernel waits, under compute-sanitizer
#     ncu, ncu_direct    profiles of pack and unpack, and of direct
#   4 allreduce   between processes
#
# FOLDER gets the output of each part as it comes, the benchmarks' rows in rows.jsonl, and, after each part, summary.txt
# and results.md, which says what was measured and what it means. No part needs another one, and the next one starts
# even if a part failed. A part that exceeds its limit is interrupted, so that tests show where they were, and is killed
# 10 s later. The exit code is the number of parts that failed. Needs a checkout, with PyTorch, Triton, numpy, pytest,
# a C compiler and the headers of Python; torchring need not be installed. PYTHON says which Python to use (default:
# python3).
set -u
out=$(realpath -m "${1:?usage: bash bench/gpu_first_run.sh FOLDER [1|2|3|4|PART...]}")
wanted=" ${*:2} "
mkdir -p "$out"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TORCHRING_EXPECT_GPU=1
python=${PYTHON:-python3}
failed=0

# part RUN NAME SECONDS COMMAND...: runs the command, with its output in FOLDER/NAME.log
part() {
    local run=$1 name=$2 limit=$3 began=$SECONDS code
    shift 3
    [ -n "${wanted// /}" ] && [[ $wanted != *" $name "* && $wanted != *" $run "* ]] && return
    echo "== $name: $*" | cut -c -120
    timeout -s INT --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    tail -n 4 "$out/$name.log"
    { [ $code -eq 124 ] || [ $code -eq 137 ]; } && echo "stopped after $limit s, its limit" | tee -a "$out/$name.log"
    [ $code -ne 0 ] && failed=$((failed + 1))
    echo "$name: exit code $code after $((SECONDS - began)) s" | tee -a "$out/summary.txt"
}

# tool_part TOOL RUN NAME SECONDS COMMAND...: a part that needs a tool of CUDA's
tool_part() {
    if command -v "$1" >/dev/null; then part "${@:2}"; else part "$2" "$3" 5 echo "$1 is not installed"; fi
}

facts='
import inspect, torch, triton, torch.distributed._symmetric_memory as symmetric
print("torch", torch.__version__, "triton", triton.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version())
count = torch.cuda.device_count()
for one in range(count):
    reached = [other for other in range(count) if other != one and torch.cuda.can_device_access_peer(one, other)]
    print(one, torch.cuda.get_device_properties(one), "reaches", reached)
print(inspect.getsource(symmetric.empty)[-700:])
'
machine="nvidia-smi; nvidia-smi topo -m; nvidia-smi -q -d CLOCK,POWER; cc --version; python3-config --includes
df -h /dev/shm; ulimit -l; $python -m pip list; $python -m torchring doctor"
mapfile -t training < <(grep -rl 'mark\.gpu' tests --include='test_*.py' --exclude-dir=kernels)
# A test that hangs prints the stacks of its threads after 100 s.
tests=("$python" -m pytest -m gpu -v -p no:cacheprovider --durations 10 -o timeout=150 -o faulthandler_timeout=100)
smoke='(sums_are_exact and direct and 2) or no_step_waits or ring_of_one or nccl_engine_alone or (between_streams and 2-direct)'
bench=("$python" -m torchring.bench.gpu --json "$out/rows.jsonl" --sections)
unwaiting='worked_example or spoils_nothing or pack or accumulate'
profiled=(ncu --set full --clock-control none --launch-count 6 --kernel-name)
worker=("$python" -m torchring.bench.gpu --worker)

[ -n "${wanted// /}" ] || : >"$out/summary.txt"
part 1 facts 60 bash -c "$machine; exec $python -c '$facts'"
part 1 doctor 60 "$python" -m torchring doctor --gpu
part 1 smoke 110 "${tests[@]}" -x "${training[@]}" tests/kernels/test_reducing.py -k "$smoke"
part 1 tests 250 "${tests[@]}" --maxfail=20 "${training[@]}"
part 2 steps 210 "${bench[@]}" step bucket
part 2 kernels 340 "${tests[@]}" --maxfail=6 tests/kernels
part 3 rates 105 "${bench[@]}" kernels
tool_part compute-sanitizer 3 sanitizer 170 bash -c 'for tool in memcheck racecheck synccheck; do compute-sanitizer \
    --tool $tool --target-processes all --error-exitcode 9 "$@" || exit; done' \
    sanitizer "${tests[@]}" tests/kernels -k "$unwaiting"
tool_part ncu 3 ncu 50 "${profiled[@]}" _pack_kernel "${worker[@]}" kernels,none
tool_part ncu 3 ncu_direct 50 "${profiled[@]}" _direct_kernel "${worker[@]}" bucket,none
part 4 allreduce 290 "${bench[@]}" allreduce
echo "Results are in $out:"
cat "$out/summary.txt"
exit "$failed"
