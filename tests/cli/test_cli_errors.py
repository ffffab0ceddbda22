"""Every error of the command line, once: one line on stderr, exit code 2, and it says what to do."""

from __future__ import annotations

import importlib.util

import pytest

SHAPE = ("--shape", "1,8,4,8")
GEMMA = "configs/gemma2_2b.yaml"
ERRORS = {
    ("explian",): "No such command 'explian'. Did you mean 'explain'? See attention-ops --help.",
    ("explain", "--devic", "a100"): "No such option '--devic'. Did you mean '--device'? See attention-ops explain --help.",
    ("explain",): "a request is --config FILE or --shape B,T,H,D, found neither; for example --shape 1,4096,8,128",
    ("explain", *SHAPE, "--config", GEMMA): "found both",
    ("explain", "vanila", *SHAPE): "no operation is named 'vanila'; known are vanilla, ",
    ("explain", "flash/rocm", *SHAPE): "no route is named 'flash/rocm'; flash has flash/gpu, ",
    ("explain", "flash", *SHAPE, "--all"): "--all explains every operation, and the name 'flash' asks for one",
    ("explain", "--shape", "1,8,2"): "Invalid value for '--shape': '1,8,2' has 3 numbers; write B,T,H,D.",
    ("explain", "--shape", "1,8,2,x"): "'x' is no whole number of 0 or more; write B,T,H,D.",
    ("explain", "--shape", "1,8,3,8", "--kv", "8,2"): "query heads 3 are not a multiple of key/value heads 2",
    ("explain", *SHAPE, "--device", "a10"): "device 'a10' is not known; known are a100, ",
    ("explain", *SHAPE, "--dtype", "int8"): "'int8' is not one of 'float16', 'bfloat16', 'float32', 'float64'.",
    ("explain", *SHAPE, "--backend", "tpu"): "there is no tpu device here",
    ("explain", *SHAPE, "--layer", "0"): "--layer goes with --config",
    ("explain", *SHAPE, "--length", "8"): "--length goes with --config; use --shape and --kv",
    ("explain", "--config", GEMMA, "--kv", "8,2"): "--kv goes with --shape; use --length T,S",
    ("explain", *SHAPE, "--load", "no_such"): "--load no_such: ModuleNotFoundError: No module named 'no_such'",
    ("explain", *SHAPE, "--load", "no/such.py"): "--load no/such.py: no such file",
    ("explain", "--config", "configs/gema2_2b.yaml"): "no such file; nearest in that folder: gemma2_2b.yaml, ",
    (
        "explain",
        "--config",
        GEMMA,
        "--layer",
        "99",
    ): "there is no layer 99. Allowed: a layer from 0 to 25, or a kind: local, global",
    ("explain", "--config", GEMMA, "--layer", "locl"): "there is no layer 'locl'. Did you mean 'local'?",
    ("explain", *SHAPE, "--kv", "16,4", "--set", "causal"): "must state query_offset",
    ("explain", *SHAPE, "--set", "cuasal=true"): "unknown attention option 'cuasal'. Did you mean 'causal'? Options: causal, ",
    ("explain", *SHAPE, "--set", "mask_info=yes"): "mask_info holds arrays and cannot be said in text; say mask=",
    ("explain", *SHAPE, "--set", "causal", "--set", "causal=no"): "causal is set twice; keep one",
    (
        "explain",
        *SHAPE,
        "--set",
        "causal=maybe",
    ): "causal=maybe: found 'maybe'; allowed is true or false, for example causal=true",
    ("explain", *SHAPE, "--set", "causal=none"): "causal=none: found 'none'; allowed is true or false",
    ("explain", *SHAPE, "--set", "bias"): "'bias' has no value; write bias=1,1,T,S:float32",
    ("explain", *SHAPE, "--set", "sliding_window=1,2,3"): "sliding_window=1,2,3: found 3 numbers; allowed is the keys before",
    ("explain", *SHAPE, "--set", "sliding_window=-1,0"): "sliding_window left is -1; allowed is 0 or more",
    ("explain", *SHAPE, "--set", "query_offset=x"): "'x' is no whole number; allowed is a whole number, traced",
    ("explain", *SHAPE, "--set", "logits_soft_cap=x"): "'x' is no number; allowed is a number above 0, or none",
    ("explain", *SHAPE, "--set", "logits_soft_cap=-1"): "logits_soft_cap is -1.0; allowed is a number from 1e-30 to 1e",
    ("explain", *SHAPE, "--set", "dropout_prob=2"): "dropout_prob is 2.0; allowed is 0 <= p < 1",
    (
        "explain",
        *SHAPE,
        "--set",
        "bias=1,1,Q,S",
    ): "bias=1,1,Q,S: 'Q' is no size; allowed is sizes in numbers and in the letters B, T",
    ("explain", *SHAPE, "--set", "bias=1,1,T,S:flot32"): "'flot32' is no dtype",
    ("explain", *SHAPE, "--set", "bias=1,1,T,9"): "its key length is 9, allowed are 1 and 8",
    ("explain", *SHAPE, "--set", "mask=B,T,S"): "three dimensions are ambiguous",
    ("explain", *SHAPE, "--set", "mask=windw(3)"): "'windw', at character 1 of 'windw(3)', is no mask. Did you mean 'window'?",
    ("explain", *SHAPE, "--set", "softmax_aux=3"): "softmax_aux has shape (3,); allowed are [H] = [4]",
    ("list", "--device", "h10"): "device 'h10' is not known; known are h100, ",
    ("show", "mask"): "a mask is --config FILE or --expr MASK, found neither",
    ("show", "mask", "--expr", "causal", "--config", GEMMA): "found both",
    ("show", "mask", "--expr", "causal", "--layer", "0"): "--layer goes with --config",
    ("show", "mask", "--config", GEMMA): "its layers differ; choose one: --layer local, --layer global",
    (
        "show",
        "mask",
        "--expr",
        "causal and window(3)",
    ): "'and', at character 8 of 'causal and window(3)', is no operator here; write &",
    ("show", "mask", "--expr", "causal", "--length", "0"): "'0' is no whole number of 1 or more; write T[,S].",
    ("show", "mask", "--expr", "causal", "--length", "4,8"): "must state query_offset",
    ("show", "mask", "--expr", "causal", "--length", "1000000"): "7813 x 7813 tiles are more than 4194304, the limit",
    ("show", "mask", "--expr", "causal", "--out", "mask.txt"): "'mask.txt' is no picture file; allowed are .pdf, .png, .svg",
    (
        "show",
        "mask",
        "--expr",
        "causal",
        "--out",
        "no/such/mask.png",
    ): "no/such/mask.png cannot be written: there is no folder no/such",
    ("config", "check"): "Missing argument 'FILE...'.",
    ("config", "from-hf", "no/such"): "no/such: cannot be read: No such file or directory",
    (
        "new",
        "My-Kernel",
    ): "'My-Kernel' is no name for a file and an operation; use a small letter, then small letters, digits and _",
    ("new", "class"): "'class' is a keyword of Python",
    ("new", "json"): "'json' is a module of Python, which the new file would hide; use another, for example json_attention",
    ("new", "test_it"): "'test_it' is taken for a test by pytest; use another, for example it_attention",
    ("new", "numpy"): "'numpy' is an installed package, which the new file would hide",
    ("new", "splash"): "'splash' is taken by attention_ops.operations.blocksparse.BlockSparse",
    ("selftest", "--op", "vanila"): "no operation is named 'vanila'; known are vanilla, ",
    ("selftest", "--ops", "vanilla"): "No such option '--ops'. Did you mean '--op'?",
    ("bench", "--lst"): "No such option '--lst'. (Did you mean one of: '--list', ",
}


@pytest.mark.parametrize("args", ERRORS, ids=" ".join)
def test_an_error_is_one_line_and_says_what_to_do(refused, args):
    assert ERRORS[args] in refused(*args)


def test_an_unknown_name_in_the_environment_is_an_error_too(refused, monkeypatch):
    monkeypatch.setenv("ATTENTION_OPS_IMPL", "vanila")
    assert "no operation is named 'vanila'" in refused("explain", *SHAPE)


def test_without_matplotlib_a_picture_is_refused_with_the_command_that_installs_it(refused, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    assert "pip install 'attention-ops[plot]'" in refused("show", "mask", "--expr", "causal", "--out", "mask.png")


def test_a_command_whose_module_is_missing_says_so(refused, monkeypatch):
    from attention_ops.cli import main

    monkeypatch.setattr(main.commands["bench"], "target", "attention_ops.no_such:main")
    assert refused("bench") == "Error: this installation of attention_ops has no bench: there is no module attention_ops.no_such"


def test_a_fault_of_the_library_is_not_dressed_as_an_error_of_the_user(cli, monkeypatch):
    from attention_ops.cli import plan_tables

    def broken(answers):
        raise TypeError("a fault")

    monkeypatch.setattr(plan_tables, "one_by_one", broken)
    with pytest.raises(TypeError, match="a fault"):
        cli("explain", *SHAPE)


@pytest.mark.parametrize("group", [(), ("show",), ("config",)])
def test_a_group_alone_shows_its_help(cli, group):
    assert "Commands:" in cli(*group, code=2).output
