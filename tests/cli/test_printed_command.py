import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..launch.tiny_run import ROOT, TINY, fake_data, words_of


def test_dry_run_prints_the_whole_command_and_writes_nothing(command, tmp_path):
    code, out, err = command(
        *("train", TINY, "--moe-strategy-set", "slots=2", "--set", "training.seed=7", "--nproc", 8),
        *(
            "--set",
            "training.micro_batch_size=2",
            "--iters",
            50,
            "--out",
            tmp_path / "runs" / "x",
            "--dry-run",
        ),
    )
    assert (code, err) == (0, "")
    first, build, *_ = out.splitlines()
    assert first == "# first, build the data:"
    assert build == (
        f"megatron-fssdp data build --out {tmp_path}/runs/data-bpe-2048 --tokenizer bpe --vocab-size 2048"
    )
    words = words_of(out)
    start = words.index("torchrun")
    assert words[start + 1 : start + 5] == ["--standalone", "--nproc-per-node=8", "-m", "megatron_fssdp"]
    assert words[start + 5] == "pretrain_gpt"
    assert str(ROOT) not in out
    for flag, value in {"--train-iters": "50", "--seed": "7", "--vocab-size": "2048"}.items():
        assert words[words.index(flag) + 1] == value
    assert "slots=2" in words
    assert f"record_dir={tmp_path}/runs/x" in words
    assert list(tmp_path.iterdir()) == []


def test_bert_uses_its_own_script_and_sentence_data(command, tmp_path):
    bert = TINY.with_name("bert_moe_tiny.yaml")
    code, out, _ = command("train", bert, "--out", tmp_path / "run", "--dry-run")
    words = words_of(out)
    script = words[words.index("megatron_fssdp") + 1]
    assert code == 0
    assert script == "pretrain_bert"
    assert words[words.index("--tokenizer-model") + 1] == str(tmp_path / "data-wordpiece-2048")
    assert words[words.index("--null-tokenizer-eod-id") + 1] == "3"
    assert "--bert-no-binary-head" not in words
    _, out, _ = command("train", bert, "--dry-run", "--set", "model.bert_binary_head=false")
    assert "--bert-no-binary-head" in words_of(out)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("bert_moe_tiny", ("data.tokenizer=bpe",), "set data.tokenizer to wordpiece"),
        ("gpt_moe_tiny", ("data.tokenizer=wordpiece",), "set data.tokenizer to bpe"),
        ("gpt_moe_tiny", ("model.family=bert",), "set data.tokenizer to wordpiece"),
        ("bert_moe_tiny", ("model.position_embedding_type=none",), "learned_absolute or rope"),
        ("bert_moe_tiny", ("model.qk_layernorm=true",), "qk_layernorm"),
        ("bert_moe_tiny", ("model.rotary_base=50000",), "supports only 10000"),
        (
            "bert_moe_tiny",
            ("parallelism.context_parallel_size=2", "parallelism.nproc_per_node=8"),
            "no context parallelism",
        ),
        ("bert_moe_tiny", ("data.path={bpe}",), "wanted --tokenizer wordpiece for model.family bert"),
        ("gpt_moe_tiny", ("data.path={wordpiece}",), "wanted --tokenizer bpe or bytes for model.family gpt"),
    ],
)
def test_data_and_settings_that_a_model_family_lacks_are_refused(
    command, tmp_path, config, arguments, message
):
    folders = {kind: fake_data(tmp_path / kind, tokenizer=kind) for kind in ("bpe", "wordpiece")}
    settings = [word for setting in arguments for word in ("--set", setting.format(**folders))]
    code, out, err = command("train", TINY.with_name(f"{config}.yaml"), "--dry-run", *settings)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_dry_run_of_a_resume_loads_the_checkpoint(command, tmp_path):
    out = tmp_path / "x"
    asked = ("train", TINY, "--out", out, "--iters", 50, "--dry-run", "--resume")
    code, _, err = command(*asked)
    assert code == 2
    assert "no checkpoint" in err
    checkpoints = out / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("20")
    code, text, err = command(*asked)
    assert (code, err) == (0, "")
    words = words_of(text)
    assert words[words.index("--load") + 1] == str(checkpoints)
    assert [path.name for path in out.iterdir()] == ["checkpoints"]


def test_a_dry_run_prints_the_command_for_a_cluster(command, tmp_path):
    code, out, _ = command(
        *("train", TINY, "--set", "parallelism.num_nodes=4", "--set", "parallelism.nproc_per_node=8"),
        *("--set", "training.global_batch_size=128", "--set", "training.device=cuda"),
        *(
            "--set",
            "training.bf16=true",
            "--set",
            f"data.path={fake_data(tmp_path / 'data')}",
            "--dry-run",
        ),
    )
    assert code == 0
    assert out.startswith(
        "MEGATRON_FSSDP_DEVICE=cuda NCCL_LAUNCH_ORDER_IMPLICIT=1 torchrun --nnodes=4 --nproc-per-node=8 "
        "--rdzv-backend=c10d"
    )
    assert '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"' in out
    words = words_of(out)
    assert words[words.index("--distributed-backend") + 1] == "nccl"
    assert words[words.index("--null-tokenizer-eod-id") + 1] == "999"


def test_a_printed_command_follows_the_machines_of_the_run_and_not_this_one(command, tmp_path):
    data = ("--set", f"data.path={fake_data(tmp_path / 'data')}")
    for cluster, layers in {"h200": "transformer_engine", "hecate-a": "local"}.items():
        parts = ("models/hecate-gpt-moe-s", f"parallelism/{cluster}", "training/measure")
        words = words_of(command("train", *parts, *data, "--dry-run")[1])
        assert words[words.index("--transformer-impl") + 1] == layers
        assert "MEGATRON_FSSDP_DEVICE=cuda" in words
    cpu = words_of(command("train", TINY, *data, "--dry-run")[1])
    assert {"MEGATRON_FSSDP_DEVICE=cpu", "OMP_NUM_THREADS=1"} < set(cpu)


def test_data_of_another_machine_does_not_keep_the_command_back(command, tmp_path):
    options = (
        "--set",
        "data.path=/nothing/here",
        "--set",
        "training.eval_interval=5",
        "--set",
        "data.vocab_size=512",
    )
    code, out, err = command("train", TINY, *options, "--dry-run")
    assert (code, err) == (0, "")
    note, *_ = out.splitlines()
    assert note.startswith(
        "# not checked: data.path '/nothing/here' does not exist on this machine; --vocab-size 512"
    )
    words = words_of(out.partition("\n")[2])
    assert words[words.index("--data-path") + 1].startswith("/nothing/here/")
    assert words[words.index("--null-tokenizer-eod-id") + 1] == "511"
    code, out, err = command("train", TINY, *options, "--out", tmp_path / "x")
    assert (code, out) == (2, "")
    assert "no built data in this folder" in err
    (tmp_path / "empty").mkdir()  # a folder that is here is checked
    code, _, err = command("train", TINY, "--set", f"data.path={tmp_path / 'empty'}", "--dry-run")
    assert code == 2
    assert "no built data in this folder" in err


@pytest.mark.slow
def test_the_printed_commands_run_in_an_empty_folder(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("data.tokenizer=bytes", "data.vocab_size=257", "training.save_checkpoints=false")
    settings = [word for setting in small for word in ("--set", setting)]
    code, text, _ = command("train", TINY, *settings, "--iters", 2, "--nproc", 4, "--dry-run")
    assert code == 0
    assert str(ROOT) not in text  # the command holds on machines where the package lies elsewhere
    assert list(tmp_path.iterdir()) == []
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        ["bash", "-ec", text], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((tmp_path / "runs" / "gpt_moe_tiny-fssdp" / "metrics.jsonl").read_text().splitlines()) == 2


def test_words_after_two_dashes_are_settings(command, tmp_path):
    options = ("--out", tmp_path / "x", "--dry-run", "--", "--moe-grouped-gemm", "--seed", "3")
    code, out, err = command("train", TINY, *options, "--moe-layer-freq", "([0]*2+[1]*2)")
    assert (code, err) == (0, "")
    words = words_of(out)
    assert "--moe-grouped-gemm" in words
    assert words[words.index("--seed") + 1] == "3"
    assert words[words.index("--moe-layer-freq") + 1] == "[0,0,1,1]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--hiden-size 3",
            "-- --hiden-size 3: Megatron has no argument --hiden-size; did you mean --hidden-size?",
        ),
        ("--hidden-size x", "-- --hidden-size x: argument --hidden-size: invalid int value: 'x'"),
        (
            "--hidden-size 30",
            "-- --hidden-size 30: model.num_attention_heads 4 does not divide model.hidden_size",
        ),
        (
            "--moe-strategy ep",
            "Megatron has no argument --moe-strategy; options of megatron-fssdp stand before --",
        ),
        (
            "--moe-layer-freq [a",
            "-- --moe-layer-freq [a: argument --moe-layer-freq: invalid moe_freq_type value",
        ),
    ],
)
def test_wrong_words_after_two_dashes_are_refused_in_one_line(command, words, message):
    code, out, err = command("train", TINY, "--dry-run", "--", *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}") or message in err
    assert len(err.splitlines()) == 1


def test_a_short_run_has_a_short_warm_up(command, tmp_path):
    (tmp_path / "run.yaml").write_text(f"include: [{TINY}]\ntraining: {{lr_warmup_iters: 10}}")
    words = words_of(command("train", tmp_path / "run.yaml", "--iters", 3, "--dry-run")[1])
    assert words[words.index("--lr-warmup-iters") + 1] == "2"
    words = words_of(command("train", tmp_path / "run.yaml", "--iters", 30, "--dry-run")[1])
    assert words[words.index("--lr-warmup-iters") + 1] == "10"


def test_multi_machine_runs_are_refused_with_the_launch_command(command, tmp_path):
    code, _, err = command(
        "train", TINY, "--set", "parallelism.num_nodes=2", "--set", "training.global_batch_size=32"
    )
    assert code == 2
    assert "use --dry-run and run the printed command on every machine" in err
