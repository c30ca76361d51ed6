#!/usr/bin/env bash
# verl 0.9.1 imports the module of model.external_lib where it makes an HFModelConfig. Its Ray trainers of SFT, and of
# PPO for critics, make this in the driver and send it to the workers, which unpickle it without that import. What the
# module registers or replaces is then there in the driver, and missing in the workers, in silence. Under torchrun, and
# in workers of actors, which make the config themselves, it is there. VERL_USE_EXTERNAL_MODULES reaches all processes.
# Two CPU cores, no GPU. Seen on 30 November 2026:
#   external_lib: driver True, worker False; VERL_USE_EXTERNAL_MODULES: driver True, worker True
# The script fails if this changes.
set -uo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv" || exit 1  # PYTHON names another interpreter
python="$work/venv/bin/python"
"$python" -m pip --disable-pip-version-check --quiet install 'torch==2.15.0' 'ray==2.60.0' 'tensordict==0.10.0' \
    'transformers==5.12.1' 'omegaconf==2.3.1' 'psutil==7.2.2' 'codetiming==1.4.0' 'hydra-core==1.3.8' || exit 1
"$python" -m pip --disable-pip-version-check --quiet install --no-deps 'verl==0.9.1' || exit 1
touch "$work/extension.py"
echo '{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}' >"$work/config.json"
cat >"$work/driver.py" <<'END_OF_DRIVER'
import os
import sys

import ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import HFModelConfig


class Probe(Worker):
    def __init__(self, config):  # as TrainingWorker gets it
        super().__init__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def has_extension(self):
        return "extension" in sys.modules


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
config = HFModelConfig(path=os.environ["MODEL"], load_tokenizer=False, external_lib=sys.argv[1] or None)
pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Probe), config=config), device_name="cpu")
print(f"driver {'extension' in sys.modules}, worker {group.has_extension()[0]}")
END_OF_DRIVER
seen() {
  (cd "$work" && PYTHONPATH="$work" MODEL="$work" RAY_USAGE_STATS_ENABLED=0 VERL_USE_EXTERNAL_MODULES="$2" \
    "$python" -W ignore driver.py "$1" 2>"$work/errors") | tail -n 1
}

by_config="$(seen extension '')"
by_variable="$(seen '' extension)"
echo "verl 0.9.1: external_lib: $by_config; VERL_USE_EXTERNAL_MODULES: $by_variable"
[[ "$by_config" == "driver True, worker False" ]] || { tail -n 5 "$work/errors"; echo "changed: external_lib"; exit 1; }
[[ "$by_variable" == "driver True, worker True" ]] || { tail -n 5 "$work/errors"; echo "changed: variable"; exit 1; }
