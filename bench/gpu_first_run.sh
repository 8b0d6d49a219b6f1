#!/usr/bin/env bash
# The first run of torchring on a machine with GPUs: facts, tests of the kernels, all tests that need a GPU, benchmarks.
#
#     bash bench/gpu_first_run.sh FOLDER            everything
#     bash bench/gpu_first_run.sh FOLDER tests bench  some parts: machine links versions doctor kernels tests bench overlap
#
# FOLDER gets the output of each part, the benchmarks' rows as JSON, and a summary. Each part has a time limit, and the
# next part starts even if a part failed. Takes at most 40 minutes. The exit code is the number of parts that failed.
# Needs a checkout, with PyTorch, Triton, numpy and pytest; torchring need not be installed. PYTHON says which Python to
# use (default: python3).
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

[ -n "${wanted// /}" ] || : >"$out/summary.txt"
part machine 30 nvidia-smi
part links 30 nvidia-smi topo -m
part versions 60 "$python" -c "$facts"
part doctor 120 "$python" -m torchring doctor
tests=("$python" -m pytest -m gpu -p no:cacheprovider --durations 10)
part kernels 420 "${tests[@]}" tests/kernels
part tests 600 "${tests[@]}" --ignore tests/kernels tests
part bench 960 "$python" -m torchring.bench.gpu --json "$out/bench.json"
part overlap 120 "$python" bench/overlap.py --trace "$out/step.json" --json "$out/overlap.json"
echo "Results are in $out:"
cat "$out/summary.txt"
exit "$failed"
