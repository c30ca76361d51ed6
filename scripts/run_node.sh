#!/usr/bin/env bash
# Runs the ranks of one node, for a scheduler that starts this script on every node (docs/operations.md). It runs the
# command that `megatron-fssdp train --dry-run` prints, and continues from the run's last checkpoint if there is one.
# SIGTERM and SIGUSR1 make the ranks save a checkpoint and end. With MAX_RESTARTS=3, ranks that failed or lost the
# ranks of another node are started again from the last checkpoint, up to 3 times; they wait for all NUM_NODES nodes.
# usage: NUM_NODES=2 RANKS_PER_NODE=8 MASTER_ADDR=node1 MASTER_PORT=29500 \
#          bash scripts/run_node.sh CONFIG.yaml OUT [MORE ARGUMENTS OF megatron-fssdp train…]
# exit:  0 the run is finished; 75 it ended early, with a checkpoint to continue from; 2 invalid input; else it failed
# With ONLY_CHECK=1, no rank starts: the exit code says whether the run is finished (0) or not (75). A node can end
# before another one has written the last checkpoint. A scheduler can ask this when all nodes have ended.
set -uo pipefail

EXIT_BAD_INPUT=2
EXIT_UNFINISHED=75 # EX_TEMPFAIL of sysexits.h: try again

if (($# < 2)); then
  echo "usage: bash scripts/run_node.sh CONFIG.yaml OUT [MORE ARGUMENTS OF megatron-fssdp train…]" >&2
  exit "$EXIT_BAD_INPUT"
fi
for name in NUM_NODES RANKS_PER_NODE MASTER_ADDR MASTER_PORT; do
  if [[ -z "${!name:-}" ]]; then
    echo "error: $name is not set; see the usage at the top of scripts/run_node.sh" >&2
    exit "$EXIT_BAD_INPUT"
  fi
done
restarts="${MAX_RESTARTS:-0}"
if [[ ! "$restarts" =~ ^[0-9]+$ ]]; then
  echo "error: MAX_RESTARTS: got '$restarts'; give a whole number" >&2
  exit "$EXIT_BAD_INPUT"
fi
config="$1" out="$2"
shift 2
node="${SLURM_NODEID:-${RANK:-0}}" # schedulers other than Slurm number their nodes by RANK
checkpoints="$out/checkpoints"

say() { echo "[fssdp] node $node: $1" >&2; }

# Prints the iteration of the last complete checkpoint, or 0 if there is no checkpoint.
last_iteration() {
  local iteration=0
  read -r iteration 2>/dev/null <"$checkpoints/latest_checkpointed_iteration.txt"
  if [[ "$iteration" =~ ^[0-9]+$ ]]; then echo "$iteration"; else echo 0; fi
}

# Prints the command. All nodes see the same mistakes in the input, so only the first node reports them.
print_command() {
  RANK="$node" megatron-fssdp train "$config" --out "$out" --dry-run \
    --set "parallelism.num_nodes=$NUM_NODES" --set "parallelism.nproc_per_node=$RANKS_PER_NODE" \
    --set "training.save=$checkpoints" "$@"
}

# Sets command, which continues from the last checkpoint if there is one. Ends the script if the run is finished.
find_command() {
  local start
  command="$(print_command "$@")" || exit
  if [[ "$command" == "# not checked: "* ]]; then
    if [[ "$node" == 0 ]]; then
      echo "error: the folder of data.path is not on this node; build it with megatron-fssdp data build, or mount it" >&2
    fi
    exit "$EXIT_BAD_INPUT"
  fi
  # Data that does not exist yet is built first. The build locks its folder, so one node builds and the others wait.
  if [[ "$command" == *$'\n# then train:\n'* ]]; then
    say "building the data"
    bash -ec "${command%%$'\n# then train:\n'*}" || exit
    command="${command#*$'\n# then train:\n'}"
  fi
  [[ "$command" =~ --train-iters\ ([0-9]+) ]] && iterations="${BASH_REMATCH[1]}"
  start="$(last_iteration)"
  if ((start >= iterations)); then
    say "the run has finished its $iterations iterations"
    exit 0
  fi
  if ((start > 0)); then
    command="$(print_command --resume "$@")" || exit
    say "continuing from iteration $start of $iterations"
  fi
}

# After SIGTERM, Megatron's ranks save and end at the end of their iteration (--exit-signal-handler). torchrun would
# kill them some seconds after it got a SIGTERM itself, so it must not get one. It therefore has a process group of its
# own, and it ignores SIGUSR1, which schedulers send to all processes.
# shellcheck disable=SC2317,SC2329 # traps call this function
end_ranks() {
  local ranks=() children
  restarts=0
  say "got SIG$1; the ranks save a checkpoint and end"
  for children in "/proc/$torchrun/task"/*/children; do
    # shellcheck disable=SC2207 # the file has numbers, each of which is one word
    [[ -r "$children" ]] && ranks+=($(<"$children"))
  done
  kill -TERM "${ranks[@]:-$torchrun}" 2>/dev/null
}

# Runs the ranks of this node and sets code, their exit code.
run_ranks() {
  set -m # gives torchrun a process group of its own
  (trap '' USR1 && exec bash -c "exec env $command --exit-signal-handler") &
  torchrun=$!
  trap 'end_ranks TERM' TERM
  trap 'end_ranks USR1' USR1
  trap 'end_ranks INT' INT
  # A trap interrupts `wait`, and the status of that `wait` is not torchrun's.
  while wait "$torchrun" || code=$?; kill -0 "$torchrun" 2>/dev/null; do :; done
  wait "$torchrun" && code=0 || code=$?
}

find_command "$@"
if [[ -n "${ONLY_CHECK:-}" ]]; then exit "$EXIT_UNFINISHED"; fi
run_ranks
while ((code != 0 && restarts > 0)); do
  restarts=$((restarts - 1))
  say "the ranks failed with exit code $code; starting them again ($restarts restarts left)"
  find_command "$@"
  run_ranks
done

if ((code == 0)) && [[ -d "$checkpoints" ]] && (($(last_iteration) < iterations)); then
  say "ended early; its last checkpoint is of iteration $(last_iteration) of $iterations"
  exit "$EXIT_UNFINISHED"
fi
exit "$code"
