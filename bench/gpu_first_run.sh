#!/usr/bin/env bash
# The first run of torchring on a machine with a GPU: two halves of six minutes, the most telling parts first.
#
#     bash bench/gpu_first_run.sh FOLDER                 both halves
#     bash bench/gpu_first_run.sh FOLDER 1               one half: 1 or 2
#     bash bench/gpu_first_run.sh FOLDER doctor steps    some parts
#     SECONDS_LEFT=200 bash bench/gpu_first_run.sh ...   ends by then: the last part gets what is left, others none
#
#   1 facts       the machine, its links, versions, and what torchring makes of it
#     doctor      a model trains by each all-reduce as in one process, and an aborted backward is named
#     tests       tests of training
#     kernels     tests of the kernels
#     memory      ten generations of ranks leave none behind; measured while nothing else runs
#     figures     kernels against a copy, aborts, late peers, the host's time for a bucket
#   2 frameworks  Lightning, Trainer and Accelerate: two ranks on one GPU against one process
#     graphs      torch.compile and CUDA graphs
#     steps       a step of GPT-2 and of ResNet-50 against DDP
#     sanitizer   tests of the kernels in which no kernel waits, under compute-sanitizer
#
# Prints a line for each part, PASS or FAIL, and one for each figure; summary.txt in FOLDER has the same lines, and a file
# for each part has its output. No part needs another one, and the next one starts even if a part failed. A part that
# exceeds its limit is interrupted, so that tests show where they were, and is killed 10 s later. The exit code is the
# number of parts that failed. Needs a checkout, with PyTorch, Triton, numpy, pytest, a C compiler and the headers of
# Python; torchring need not be installed. With pytest-xdist, tests run side by side. PYTHON says which Python to use
# (default: python3).
set -u
out=$(realpath -m "${1:?usage: bash bench/gpu_first_run.sh FOLDER [1|2|PART...]}")
wanted=" ${*:2} "
mkdir -p "$out"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TORCHRING_EXPECT_GPU=1
python=${PYTHON:-python3}
failed=0

say() { echo "$1" | tee -a "$out/summary.txt"; }

# part HALF NAME SECONDS COMMAND...: runs the command, with its output in FOLDER/NAME.log
part() {
    local half=$1 name=$2 limit=$3 began=$SECONDS left=$((${SECONDS_LEFT:-100000} - SECONDS)) code verdict=PASS
    shift 3
    [ -n "${wanted// /}" ] && [[ $wanted != *" $name "* && $wanted != *" $half "* ]] && return
    ((left < limit)) && limit=$left
    ((limit < 25)) && say "LEFT OUT $name: $limit s are left" && return
    timeout -s INT --kill-after=10 $((limit - 10)) "$@" >"$out/$name.log" 2>&1
    code=$?
    ((code == 0)) || { verdict=FAIL && failed=$((failed + 1)); }
    ((code == 124 || code == 137)) && echo "stopped, at its limit" >>"$out/$name.log"
    grep -aE '^ *(PASS|FAIL) ' "$out/$name.log" | tee -a "$out/summary.txt"
    say "$verdict $name, $((SECONDS - began)) s: $(tail -n 1 "$out/$name.log" | cut -c -120)"
}

facts='
import torch, triton
print("torch", torch.__version__, "triton", triton.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version())
count = torch.cuda.device_count()
for one in range(count):
    reached = [other for other in range(count) if other != one and torch.cuda.can_device_access_peer(one, other)]
    print(one, torch.cuda.get_device_name(one), "reaches", reached)
'
machine="nvidia-smi; nvidia-smi topo -m; cc --version; python3-config --includes; df -h /dev/shm; ulimit -l
$python -m torchring doctor"
mapfile -t training < <(grep -rl 'mark\.gpu' tests --include='test_*.py' --exclude-dir={kernels,platforms} \
    --exclude=test_gpu_graphs.py)
# A test that hangs prints the stacks of its threads after 100 s.
tests=("$python" -m pytest -m gpu -p no:cacheprovider --durations 10 -o timeout=150 -o faulthandler_timeout=100)
side_by_side=()
"$python" -c 'import xdist' 2>/dev/null && side_by_side=(-n 4)
check=("$python" -m qa.gpu.check)
unwaiting='worked_example or spoils_nothing or pack or accumulate or quantized or decoded'
sanitize='for tool in memcheck racecheck; do compute-sanitizer --tool $tool --target-processes all --error-exitcode 9 "$@" \
    || exit; done'

[ -n "${wanted// /}" ] || : >"$out/summary.txt"
part 1 facts 40 bash -c "$machine; exec $python -c '$facts'"
part 1 doctor 40 "$python" -m torchring doctor --gpu
part 1 tests 120 "${tests[@]}" "${side_by_side[@]}" --maxfail=20 "${training[@]}"
part 1 kernels 50 "${tests[@]}" "${side_by_side[@]}" --maxfail=6 tests/kernels
part 1 memory 40 "${tests[@]}" tests/devices/test_gpu_faults.py -k memory
part 1 figures 70 "${check[@]}" kernels host
part 2 frameworks 110 "${tests[@]}" tests/platforms/test_gpu.py
part 2 graphs 100 "${tests[@]}" tests/devices/test_gpu_graphs.py
part 2 steps 90 "${check[@]}" steps
part 2 sanitizer 60 bash -c "$sanitize" sanitizer "${tests[@]}" tests/kernels -k "$unwaiting"
exit "$failed"
