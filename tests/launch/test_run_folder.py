from megatron_fssdp.config.loading import load_yaml, validate
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.launch.run_folder import RunFolder
from megatron_fssdp.launch.train_request import TrainRequest

from .tiny_run import TINY


def test_an_overwritten_run_is_moved_aside_with_all_its_files(tmp_path):
    folder = RunFolder(tmp_path / "x")
    assert folder.move_aside() is None
    folder.create(load_run([TINY]))
    for name in ("metrics.jsonl", "loads.npy", "notes.txt", "report.html"):
        (folder.path / name).touch()
    aside = folder.move_aside()
    assert aside is not None
    assert aside.name.startswith("x.old-")
    names = {path.name for path in aside.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "notes.txt", "report.html"} < names
    assert not folder.path.exists()


def test_a_full_disk_does_not_hide_why_a_run_stopped(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log.symlink_to("/dev/full")
    folder.note_stop(3, "out of luck")


def test_words_for_megatron_are_in_the_record_and_are_kept(tmp_path):
    words = "--hidden-size 128 --moe-z-loss-coeff 1e-3 --moe-grouped-gemm --moe-layer-freq ([0]*2+[1]*2)"
    request = TrainRequest([TINY], out=tmp_path, megatron_words=words.split())
    run = request.resolve()
    request.folder.create(run, request.changed_settings())
    recorded = validate(RunConfig, load_yaml(tmp_path / "config.yaml"), "config.yaml")
    assert recorded == run
    assert list(load_yaml(tmp_path / "config.yaml")) == list(RunConfig.model_fields)
    assert (recorded.model.hidden_size, recorded.model.moe_z_loss_coeff) == (128, 1e-3)
    assert recorded.model.moe_layer_freq == (0, 0, 1, 1)
    assert recorded.model.moe_grouped_gemm
    assert TrainRequest([TINY], out=tmp_path, resume=True).resolve() == run
