import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..launch.tiny_run import ROOT, TINY, fake_data, words_of

BERT = TINY.with_name("bert_moe_tiny.yaml")
CP2 = "--set parallelism.context_parallel_size=2"


def sets(*settings):
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture
def printed(command):
    """Runs `train ARGS… --dry-run`, requires success and returns the text, its words, and a flag's value."""

    def run(*arguments):
        code, text, err = command("train", *arguments)
        assert (code, err) == (0, "")
        words = words_of("\n".join(line for line in text.splitlines() if not line.startswith("#")))
        return text, words, lambda flag: words[words.index(flag) + 1]

    return run


def test_dry_run_prints_the_whole_command_and_writes_nothing(printed, tmp_path):
    text, words, value = printed(
        *(TINY, "--moe-strategy-set", "slots=2", *sets("training.seed=7", "training.micro_batch_size=2")),
        *("--nproc", 8, "--iters", 50, "--out", tmp_path / "runs" / "x", "--dry-run"),
    )
    assert text.splitlines()[:2] == [
        "# first, build the data:",
        f"megatron-fssdp data build --out {tmp_path}/runs/data-bpe-2048 --tokenizer bpe --vocab-size 2048",
    ]
    start = words.index("torchrun")
    wanted = ["--standalone", "--nproc-per-node=8", "-m", "megatron_fssdp", "pretrain_gpt"]
    assert words[start + 1 : start + 6] == wanted
    assert {"MEGATRON_FSSDP_DEVICE=cpu", "OMP_NUM_THREADS=1", "TORCHDYNAMO_DISABLE=1"} < set(words)
    assert str(ROOT) not in text
    for flag, wanted in {"--train-iters": "50", "--seed": "7", "--vocab-size": "2048"}.items():
        assert value(flag) == wanted
    assert {"slots=2", f"record_dir={tmp_path}/runs/x"} < set(words)
    assert list(tmp_path.iterdir()) == []


def test_bert_uses_its_own_script_and_sentence_data(printed, tmp_path):
    _, words, value = printed(BERT, "--out", tmp_path / "run", "--dry-run")
    assert value("megatron_fssdp") == "pretrain_bert"
    assert value("--tokenizer-model") == str(tmp_path / "data-wordpiece-2048")
    assert value("--null-tokenizer-eod-id") == "3"
    assert "--bert-no-binary-head" not in words
    assert "--bert-no-binary-head" in printed(BERT, "--dry-run", *sets("model.bert_binary_head=false"))[1]


def test_a_printed_command_follows_the_machines_of_the_run_and_not_this_one(printed, tmp_path):
    data = sets(f"data.path={fake_data(tmp_path / 'data')}")
    for cluster, layers in {"h200": "transformer_engine", "hecate-a": "local"}.items():
        parts = ("models/hecate-gpt-moe-s", f"parallelism/{cluster}", "training/measure")
        _, words, value = printed(*parts, *data, "--dry-run")
        assert value("--transformer-impl") == layers
        assert "MEGATRON_FSSDP_DEVICE=cuda" in words
    many = sets("parallelism.num_nodes=4", "parallelism.nproc_per_node=8", "training.global_batch_size=128")
    many += sets("training.device=cuda", "training.bf16=true")
    text, _, value = printed(TINY, *many, *data, "--dry-run")
    assert text.startswith(
        "MEGATRON_FSSDP_DEVICE=cuda torchrun --nnodes=4 --nproc-per-node=8 "
        '--rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'
    )
    assert value("--distributed-backend") == "nccl"
    assert value("--null-tokenizer-eod-id") == "999"


def test_data_of_another_machine_does_not_keep_the_command_back(command, printed, tmp_path):
    options = sets("data.path=/nothing/here", "training.eval_interval=5", "data.vocab_size=512")
    text, _, value = printed(TINY, *options, "--dry-run")
    said = "# not checked: data.path '/nothing/here' does not exist on this machine; --vocab-size 512"
    assert text.startswith(said)
    assert value("--data-path").startswith("/nothing/here/")
    assert value("--null-tokenizer-eod-id") == "511"
    (tmp_path / "empty").mkdir()  # a folder that is here is checked
    empty = (*sets(f"data.path={tmp_path / 'empty'}"), "--dry-run")
    for refused in ((*options, "--out", tmp_path / "x"), empty):
        code, out, err = command("train", TINY, *refused)
        assert (code, out) == (2, "")
        assert "no built data in this folder" in err


@pytest.mark.slow
def test_the_printed_commands_run_in_an_empty_folder(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = sets("data.tokenizer=bytes", "data.vocab_size=257", "training.save_checkpoints=false")
    text, *_ = printed(TINY, *small, "--iters", 2, "--nproc", 4, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-ec", text], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((tmp_path / "runs" / "gpt_moe_tiny-fssdp" / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_short_run_has_a_short_warm_up(printed, tmp_path):
    (tmp_path / "run.yaml").write_text(f"include: [{TINY}]\ntraining: {{lr_warmup_iters: 10}}")
    for iterations, warm_up in ((3, "2"), (30, "10")):
        value = printed(tmp_path / "run.yaml", "--iters", iterations, "--dry-run")[2]
        assert value("--lr-warmup-iters") == warm_up


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nproc 6", "--nproc 6: parallelism.expert_model_parallel_size 4"),
        ("--iters 0", "--iters 0: training.train_iters: got 0, wanted"),
        ("--moe-strategy-set slots=two", "--moe-strategy-set slots=two: strategy"),
        (f"{CP2} --set training.global_batch_size=8", "Transformer Engine"),
        # settings and data that a model family does not have
        ("bert --set data.tokenizer=bpe", "set data.tokenizer to wordpiece"),
        ("bert --set model.position_embedding_type=none", "learned_absolute or rope"),
        ("bert --set model.qk_layernorm=true", "qk_layernorm"),
        ("bert --set model.rotary_base=50000", "rotary_base: got 50000, wanted 10000"),
        (f"bert {CP2} --set parallelism.nproc_per_node=8", "context_parallel_size: got 2, wanted 1"),
        ("bert --set data.path={bpe}", "wanted --tokenizer wordpiece for model.family bert"),
        ("--set data.path={wordpiece}", "wanted --tokenizer bpe or bytes for model.family gpt"),
        # words of Megatron
        ("-- --hiden-size 3", "Megatron has no argument --hiden-size; did you mean --hidden-size?"),
        ("-- --hidden-size x", "argument --hidden-size: invalid int value: 'x'"),
        ("-- --moe-strategy ep", "no argument --moe-strategy; options of megatron-fssdp stand before --"),
        ("-- --moe-layer-freq [a", "argument --moe-layer-freq: invalid moe_freq_type value"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(command, arguments, message, tmp_path):
    folders = {kind: fake_data(tmp_path / kind, tokenizer=kind) for kind in ("bpe", "wordpiece")}
    words = arguments.format(**folders).split()
    config = BERT if words[0] == "bert" else TINY
    code, out, err = command("train", config, "--out", tmp_path / "x", "--dry-run", *words[config is BERT :])
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "x").exists()
