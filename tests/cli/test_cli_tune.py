"""`attention-ops tune`: what is measured is said, what wins is kept, and the next plan shows it."""

from __future__ import annotations

import json

import pytest

from attention_ops import storage, tuning
from attention_ops.bench import tune as bench

SMALL = (
    "--shape",
    "1,32,2,8",
    "--dtype",
    "float32",
    "--set",
    "causal",
    "--block-q",
    "16,32",
    "--block-kv",
    "16",
    "--rounds",
    "1",
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(storage.ENVIRONMENT, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def timed(monkeypatch):
    """Let (16, 16) take half of the default's time and compile nothing; `wins=False` lets all candidates take longer."""
    monkeypatch.setattr(bench.Job, "prepare", lambda self: lambda sizes: lambda: None)

    def choose(wins: bool = True):
        def timed(calls, rounds, step):
            pairs = [(sizes, 0.5 if wins and sizes.q == 16 else 1.5) for sizes in calls if sizes is not None]
            return {sizes: bench.Trial(sizes, (ratio,) * rounds) for sizes, ratio in pairs}, 0.25

        monkeypatch.setattr(bench, "_timed", timed)

    choose()
    return choose


def tuned(result):
    (one,) = json.loads(result.stdout)["tuned"]
    return one


def test_a_winner_is_kept_shown_and_used_by_the_next_plan(cli, timed, folder):
    result = cli("tune", "blocksparse", *SMALL)
    assert "blocksparse/native, forward: B 1, T 32, S 32, H 2, K 2, D 8, Dv 8, float32, causal" in result.stdout
    assert "block sizes (16, 16) take 0.50 of the default's time and are kept" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["16", "16", "0.50", "1", "kept"] in rows
    assert ["default", "1.00", "(250", "ms)"] in rows
    (entry,) = json.loads((folder / "block_sizes.json").read_text())["kept"]
    assert (entry["q"], entry["kv"], entry["route"], entry["work"]) == (16, 16, "blocksparse/native", "forward")
    plan = cli("explain", "blocksparse", "--shape", "1,32,2,8", "--dtype", "float32", "--set", "causal").stdout
    assert f"block sizes (16, 16) tuned on {entry['date']} by `attention-ops tune`" in plan


def test_json_holds_every_trial(cli, timed):
    one = tuned(cli("tune", "blocksparse", *SMALL, "--json", "--backward"))
    assert one["default_seconds"] == 0.25
    assert [(trial["q"], trial["kv"], trial["ratio"], trial["final"]) for trial in one["trials"]] == [
        (16, 16, 0.5, True),
        (32, 16, 1.5, True),
    ]
    assert one["kept"]["work"] == "gradient"


def test_without_a_winner_the_default_stays_and_an_old_winner_goes(cli, timed):
    cli("tune", "blocksparse", *SMALL)
    assert len(tuning.table().kept) == 1
    timed(wins=False)
    result = cli("tune", "blocksparse", *SMALL)
    assert "no candidate saves 5% of the default's time in most rounds; the default rule stays" in result.stdout
    assert not tuning.table().kept


def test_it_measures_for_real(cli):
    one = tuned(cli("tune", "flash", *SMALL, "--json"))
    assert one["default_seconds"] > 0
    assert all(trial["ratio"] > 0 and trial["failure"] is None for trial in one["trials"])


def test_a_dry_run_measures_and_keeps_nothing(cli, folder, monkeypatch):
    monkeypatch.setattr(bench, "measure", None)
    text = cli("tune", "blocksparse", *SMALL, "--dry-run").stdout
    assert "  the default rule, and (q, kv) of (16, 16), (32, 16)\n" in text
    (one,) = json.loads(cli("tune", "blocksparse", *SMALL, "--dry-run", "--json").stdout)["would_measure"]
    assert one["candidates"] == [{"q": 16, "kv": 16}, {"q": 32, "kv": 16}]
    assert not folder.exists()


def test_each_kind_of_layer_of_a_config_is_a_request(cli):
    result = cli("tune", "--config", "configs/gemma3_1b.yaml", "--length", "2048", "--dry-run", "--json")
    local, everywhere = (one["request"] for one in json.loads(result.stdout)["would_measure"])
    assert local.endswith("T 2048, S 2048, H 4, K 1, D 256, Dv 256, bfloat16, causal & window(511, 0)")
    assert everywhere.endswith("T 2048, S 2048, H 4, K 1, D 256, Dv 256, bfloat16, causal")


def test_list_and_clear(cli, timed, folder):
    assert cli("tune", "--list").stdout.startswith("nothing is kept in ")
    for name in ("flash", "blocksparse"):
        cli("tune", name, *SMALL)
    listed = cli("tune", "--list").stdout
    assert "flash/native" in listed
    assert "T 32, S 32, D 8, Dv 8, groups 1, float32, causal, visible 1/1" in listed
    (flash,) = json.loads(cli("tune", "flash_attn2", "--list", "--json").stdout)["kept"]
    assert flash["route"] == "flash/native"
    assert cli("tune", "flash", "--clear").stdout == "1 forgotten\n"
    assert [one.route for one in tuning.table().kept.values()] == ["blocksparse/native"]
    assert json.loads(cli("tune", "--clear", "--json").stdout) == {"forgotten": 1}
    assert not tuning.table().kept


def test_what_cannot_be_asked_is_one_line(refused, tmp_path, monkeypatch):
    assert "found neither" in refused("tune")
    assert "vanilla/native, which takes no block sizes; name one that does: blocksparse/gpu, blocksparse/native, " in refused(
        "tune", "vanilla", *SMALL
    )
    assert "--list and --clear go alone; found --list with --shape" in refused("tune", "--list", *SMALL)
    assert "go alone" in refused("tune", "--list", "--clear")
    assert "unknown" in refused("tune", "blocksparse", *SMALL, "--set", "caused=1")
    monkeypatch.setattr(bench, "measure", None)  # refused before anything is measured
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(storage.ENVIRONMENT, str(tmp_path / "file"))
    message = refused("tune", "blocksparse", *SMALL)
    assert f"tuned block sizes cannot be kept in {tmp_path / 'file'} (" in message
    assert "set ATTENTION_OPS_CACHE_DIR to a folder that can be written" in message


def test_a_fallback_is_tuned_under_its_own_name(cli, timed):
    result = cli("tune", "cudnn_flash", *SMALL)
    assert result.stderr == "cudnn_flash cannot take this request; flash/native, which runs instead, is tuned\n"
    assert [one.route for one in tuning.table().kept.values()] == ["flash/native"]


def test_a_truncated_file_is_a_warning_and_is_rebuilt(cli, timed, folder):
    folder.mkdir()
    (folder / "block_sizes.json").write_text('{"kept": [')
    with pytest.warns(UserWarning, match="block_sizes.json cannot be read and is ignored"):
        cli("tune", "blocksparse", *SMALL)
    assert len(tuning.table().kept) == 1
