"""Two emulated nodes on this machine, each started by scripts/run_node.sh as a scheduler does."""

import os
import socket
import subprocess
import sys
import time

import yaml

from tests.support.python_process import ROOT

NODE = ROOT / "scripts" / "run_node.sh"
UNFINISHED = 75

RUN = yaml.safe_load("""
    model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, seq_length: 16,
            num_experts: 4, moe_router_load_balancing_type: none}
    data: {external: true}
    parallelism: {expert_model_parallel_size: 2}
    training: {train_iters: 60, micro_batch_size: 1, global_batch_size: 4, device: cpu, mock_data: true,
               tokenizer_type: NullTokenizer, vocab_size: 257}
    strategy: {name: fssdp, settings: {slots: 1, overlap_degree: 2}}
""")


class TwoNodes:
    """A run on nodes with real ranks, which share a file system.

    ``prefix`` gives the words before a node's command, none where all nodes use this machine's loopback;
    ``settings`` are those of the section ``training``.
    """

    def __init__(self, folder, prefix=None, **settings):
        self.folder, self.out, self.config = folder, folder / "out", folder / "two_nodes.yaml"
        self.config.write_text(yaml.safe_dump({**RUN, "training": {**RUN["training"], **settings}}))
        self.prefix = prefix or (lambda node: [])
        self.bin = folder / "bin"
        self.bin.mkdir()
        modules = {"megatron-fssdp": "megatron_fssdp.cli.app", "torchrun": "torch.distributed.run"}
        for name, module in modules.items():
            (self.bin / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            (self.bin / name).chmod(0o755)
        self.processes = []

    def start(self, nodes=2, ranks_per_node=1, **env):
        """Start all nodes; variables of the environment win over those that a scheduler sets."""
        scheduler = {"NUM_NODES": str(nodes), "RANKS_PER_NODE": str(ranks_per_node)}
        scheduler |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        paths = {"PYTHONPATH": str(ROOT), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.env = {**os.environ, **paths, **scheduler, **env}
        self.processes = [self.start_node(node) for node in range(nodes)]

    def start_node(self, node):
        """Start one node, for the first time or again."""
        words = [*self.prefix(node), "bash", NODE, self.config, self.out]
        env = {**self.env, "RANK": str(node)}
        with (self.folder / f"log-{node}").open("a") as log:
            return subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)

    def num_iterations(self):
        """Number of recorded iterations; repeated ones count again."""
        metrics = self.out / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def saved_iteration(self):
        """The iteration of the last checkpoint."""
        tracker = self.out / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text() or 0) if tracker.exists() else 0

    def wait_until(self, is_so):
        """Wait for something that happens while all nodes run."""
        while not is_so():
            assert all(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.05)

    def exit_codes(self):
        return [process.wait() for process in self.processes]

    def said(self):
        return "\n".join(log.read_text()[-3000:] for log in sorted(self.folder.glob("log-*")))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for process in self.processes:
            if process.poll() is None:
                process.terminate()  # which the ranks obey
        self.exit_codes()


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
