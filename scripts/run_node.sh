#!/usr/bin/env bash
# Runs one node's ranks of a YAML's run, for a scheduler that starts this on every node (docs/clusters.md): the
# command that `megatron-fssdp train --dry-run` prints, from the run's last checkpoint where there is one.
# SIGTERM and SIGUSR1 make the ranks save a checkpoint and end. MAX_RESTARTS=3 starts ranks that failed, or lost another
# node's, so many times again, from the last checkpoint; they wait for all NUM_NODES nodes.
# usage: NUM_NODES=2 RANKS_PER_NODE=8 MASTER_ADDR=node1 MASTER_PORT=29500 \
#          bash scripts/run_node.sh CONFIG.yaml OUT [MORE ARGUMENTS OF megatron-fssdp train…]
# exit:  0 the run is finished; 75 it ended early, with a checkpoint to go on from; 2 bad input; else it failed
set -uo pipefail

EXIT_BAD_INPUT=2
EXIT_UNFINISHED=75 # EX_TEMPFAIL of sysexits.h: try again

if (($# < 2)); then
  echo "usage: bash scripts/run_node.sh CONFIG.yaml OUT [MORE ARGUMENTS OF megatron-fssdp train…]" >&2
  exit "$EXIT_BAD_INPUT"
fi
for name in NUM_NODES RANKS_PER_NODE MASTER_ADDR MASTER_PORT; do
  if [[ -z "${!name:-}" ]]; then
    echo "error: $name is not set; usage: at the top of scripts/run_node.sh" >&2
    exit "$EXIT_BAD_INPUT"
  fi
done
restarts="${MAX_RESTARTS:-0}"
if [[ ! "$restarts" =~ ^[0-9]+$ ]]; then
  echo "error: MAX_RESTARTS: got '$restarts', wanted a whole number" >&2
  exit "$EXIT_BAD_INPUT"
fi
config="$1" out="$2"
shift 2
node="${SLURM_NODEID:-${RANK:-0}}" # a PyTorchJob numbers its pods by RANK
checkpoints="$out/checkpoints"

say() { echo "[fssdp] node $node: $1" >&2; }

# Iteration of the last complete checkpoint; 0 without one.
last_iteration() {
  local iteration=0
  read -r iteration 2>/dev/null <"$checkpoints/latest_checkpointed_iteration.txt"
  if [[ "$iteration" =~ ^[0-9]+$ ]]; then echo "$iteration"; else echo 0; fi
}

# Prints the command; of several nodes, which all see the same mistakes, the first speaks.
print_command() {
  RANK="$node" megatron-fssdp train "$config" --out "$out" --dry-run \
    --set "parallelism.num_nodes=$NUM_NODES" --set "parallelism.nproc_per_node=$RANKS_PER_NODE" \
    --set "training.checkpoint_dir=$checkpoints" "$@"
}

# What to run, from the last checkpoint where there is one; ends the script if nothing is left to do.
find_command() {
  local start
  command="$(print_command "$@")" || exit
  [[ "$command" =~ --train-iters\ ([0-9]+) ]] && iterations="${BASH_REMATCH[1]}"
  start="$(last_iteration)"
  if ((start >= iterations)); then
    say "the run has finished its $iterations iterations"
    exit 0
  fi
  if ((start > 0)); then
    command="$(print_command --resume "$@")" || exit
    say "going on from iteration $start of $iterations"
  fi
}

# Megatron's ranks save and end at the end of an iteration after SIGTERM (--exit-signal-handler). torchrun would kill them
# seconds after a SIGTERM of its own, so it gets none: not with its group, and SIGUSR1, sent to all, is ignored there.
# shellcheck disable=SC2317,SC2329 # traps call it
end_ranks() {
  local ranks=() children
  restarts=0
  say "got SIG$1; the ranks save a checkpoint and end"
  for children in "/proc/$torchrun/task"/*/children; do
    # shellcheck disable=SC2207 # numbers, one word each
    [[ -r "$children" ]] && ranks+=($(<"$children"))
  done
  kill -TERM "${ranks[@]:-$torchrun}" 2>/dev/null
}

# Sets the exit code of this node's ranks.
run_ranks() {
  set -m # a process group of its own for torchrun
  (trap '' USR1 && exec bash -c "exec env $command --exit-signal-handler") &
  torchrun=$!
  trap 'end_ranks TERM' TERM
  trap 'end_ranks USR1' USR1
  trap 'end_ranks INT' INT
  # A trap interrupts `wait`, whose status then is not torchrun's.
  while wait "$torchrun" || code=$?; kill -0 "$torchrun" 2>/dev/null; do :; done
  wait "$torchrun" && code=0 || code=$?
}

find_command "$@"
run_ranks
while ((code != 0 && restarts > 0)); do
  say "the ranks failed with exit code $code; starting them again ($restarts more times)"
  restarts=$((restarts - 1))
  find_command "$@"
  run_ranks
done

if ((code == 0)) && [[ -d "$checkpoints" ]] && (($(last_iteration) < iterations)); then
  say "ended early; its last checkpoint is of iteration $(last_iteration) of $iterations"
  exit "$EXIT_UNFINISHED"
fi
exit "$code"
