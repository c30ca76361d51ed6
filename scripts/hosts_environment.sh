#!/usr/bin/env bash
# Makes .venv-hosts, beside .venv, in which the tests of tests/hosts train: this project, Megatron-Bridge, ms-swift,
# mcore-bridge and verl, without CUDA extensions. usage: bash scripts/hosts_environment.sh
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

VENV="$ROOT/.venv-hosts"
VENV_PYTHON="$VENV/bin/python"
INSTALL_STAMP="$VENV/.megatron-fssdp-installed"
CONSTRAINTS=constraints-hosts.txt
SUITABLE_PYTHON="Python 3.12" # Megatron-Bridge 0.6.2 wants no other version
SUITABLE_VERSIONS="sys.version_info[:2] == (3, 12)"

# What the modules of Megatron-Bridge import. Its own requirements add Transformer Engine, FlashInfer and others, which
# compile CUDA code, and nvidia-resiliency-ext, whose version 0.4.1 makes megatron-core 0.19 impossible to import.
BRIDGE_IMPORTS=(
  accelerate braceexpand datasets einops filetype hydra-core megatron-energon mfusepy multi-storage-client ninja
  nvidia-ml-py nvidia-modelopt omegaconf peft pulp rapidyaml requests s3fs scipy tensorboard transformers webdataset
)
# What verl's workers import, beside tensordict. Requirements of verl want an older transformers, those of its extras
# another Megatron-Bridge, and those of tensordict 0.10 an older packaging.
VERL_IMPORTS=(codetiming orjson pyvers ray)

_install_packages() {
  _pip_install --editable "${ROOT}[dev]" mcore-bridge ms-swift "${BRIDGE_IMPORTS[@]}" "${VERL_IMPORTS[@]}" &&
    _pip_install --no-deps megatron-bridge tensordict verl &&
    # verl's wheel has packages of these names, which hide those of this project.
    rm -rf "$VENV"/lib/python3.12/site-packages/{tests,scripts}
}

prepare_environment
