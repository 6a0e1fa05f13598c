"""The table of flags is what the releases' parsers say, and values are cast to it."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import zipfile

import pytest
from ansible.module_utils.sglang_lint_flags import cast_flags
from ansible.module_utils.sglang_lint_rules import TORCH_NCCL, Context
from ansible.module_utils.sglang_variant_flags import FlagTable, cast

RELEASES = (
    "0.5.8.post1 0.5.9 0.5.10.post1 0.5.11 0.5.12.post1 0.5.13.post1 0.5.14 "
    "0.5.15.post1 0.5.16 0.5.18 0.5.20 0.5.21 0.5.22 0.5.23"
).split()
# The launch line of the campaign: every release knows every flag of it.
SEED = (
    "model-path trust-remote-code tp-size mem-fraction-static host port "
    "num-continuous-decode-steps disable-custom-all-reduce"
).split()
CLASSIC = """
CHOICES = ["auto", "dummy"]
class ServerArgs:
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True, help="path")
        parser.add_argument("--load-format", type=str, choices=CHOICES + ["pt"])
        parser.add_argument("--tp-size", type=int, default=1)
        parser.add_argument("--trust", action="store_true", help="trust")
        parser.add_argument("--lora-paths", type=str, nargs="*")
        parser.add_argument("--gone", action="store_true")
"""
ANNOTATED = """
class ServerArgs:
    model_path: A[str, Arg(help="path", aliases=["--model"])]
    load_format: A[str, Arg(help="format", choices=["auto", "dummy", "pt"])] = "auto"
    tp_size: A[int, "ranks"] = 1
    fraction: A[Optional[float], "part"] = None
    trust: A[bool, "trust"] = False
    lora_paths: A[Optional[str], Arg(help="paths", nargs="*")] = None
    hidden: A[bool, Arg(no_cli=True)] = False
    kind: A[Literal["a", "b"], "kind"] = "a"
    mode: A[Literal[1, 2], "mode"] = 2
    late: A[Literal["a", "b"], Arg(help="late", choices=Backend.ALL)] = "a"
    sizes: A[Optional[List[int]], "sizes"] = None
    joined: A[Optional[List[int]], Arg(help="joined", type_parser=json_list)] = None
    fast: A[bool, Arg(help="fast", action=argparse.BooleanOptionalAction)] = True
    adapters: A[Optional[List[str]], Arg(help="a", action=PathAction, action_kwargs={"type": str, "nargs": "*"})] = None
    plain: int = 3
    def add_cli_args(parser):
        parser.add_argument("--swap", action=DeprecatedStoreConstAction, const_value="x", help="Deprecated alias")
        parser.add_argument("--swap-value", action=DeprecatedStoreConstAction, nargs=None, help="Deprecated")
        parser.add_argument("--old", action=DeprecatedStoreTrueAction, help="Deprecated")
"""


@pytest.fixture(scope="module")
def extractor(repository):
    """Return tools/extract_sglang_flags.py as a module."""
    spec = importlib.util.spec_from_file_location("extract_sglang_flags", repository / "tools/extract_sglang_flags.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder, version, source):
    """Return a release package with one parser."""
    path = folder / f"sglang-{version}-py3-none-any.whl"
    metadata = (
        f"Name: sglang\nVersion: {version}\nRequires-Dist: torch==2.9.1\nRequires-Dist: flashinfer_python==0.6.3\n"
    )
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("sglang/srt/server_args.py", source)
        package.writestr(f"sglang-{version}.dist-info/METADATA", metadata)
    return path


def test_both_ways_to_build_a_parser_are_read(extractor, tmp_path):
    old = extractor.read_wheel(wheel(tmp_path, "0.5.9", CLASSIC))
    table = extractor.merge([extractor.read_wheel(wheel(tmp_path, "0.5.14", ANNOTATED)), old])
    assert table["releases"] == ["0.5.9", "0.5.14"]
    assert table["pins"]["0.5.9"] == {"torch": "2.9.1", "flashinfer": "0.6.3"}
    both, new = {"since": "0.5.9", "until": "0.5.14"}, {"since": "0.5.14", "until": "0.5.14"}
    assert table["flags"] == {
        "model-path": [{**both, "kind": "value", "type": "str"}],
        "model": [{**both, "kind": "value", "type": "str", "alias_of": "model-path"}],
        "load-format": [{**both, "kind": "value", "type": "str", "choices": ["auto", "dummy", "pt"]}],
        "tp-size": [{**both, "kind": "value", "type": "int"}],
        "trust": [{**both, "kind": "bare", "type": "str"}],
        "lora-paths": [{**both, "kind": "list", "type": "str"}],
        "gone": [{"since": "0.5.9", "until": "0.5.9", "kind": "bare", "type": "str"}],
        "fraction": [{**new, "kind": "value", "type": "float"}],
        "kind": [{**new, "kind": "value", "type": "str", "choices": ["a", "b"]}],
        "mode": [{**new, "kind": "value", "type": "int", "choices": ["1", "2"]}],
        "late": [{**new, "kind": "value", "type": "str"}],
        "swap": [{**new, "kind": "bare", "type": "str", "deprecated": True}],
        "swap-value": [{**new, "kind": "value", "type": "str", "deprecated": True}],
        "sizes": [{**new, "kind": "list", "type": "int"}],
        "joined": [{**new, "kind": "value", "type": "str"}],
        "fast": [{**new, "kind": "bare", "type": "str"}],
        "no-fast": [{**new, "kind": "bare", "type": "str", "alias_of": "fast"}],
        "adapters": [{**new, "kind": "list", "type": "str"}],
        "old": [{**new, "kind": "bare", "type": "str", "deprecated": True}],
    }


@pytest.mark.skipif(not os.environ.get("SGLANG_WHEELS"), reason="SGLANG_WHEELS names no folder of release packages")
def test_the_table_is_what_the_real_packages_say(extractor, tables):
    paths = [
        next(pathlib.Path(os.environ["SGLANG_WHEELS"]).glob(f"sglang-{release}-*.whl"))
        for release in tables["flags"]["releases"]
    ]
    assert extractor.merge([extractor.read_wheel(path) for path in paths]) == tables["flags"]


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_knows_the_campaigns_launch_line(tables, release):
    table = FlagTable(tables["flags"], release)
    assert table.exact
    assert [flag for flag in SEED if not table.get(flag)] == []
    assert len(table.names()) > 300


def test_every_pinned_torch_has_a_known_nccl_and_every_release_its_variables(tables):
    for release in tables["flags"]["releases"]:
        context = Context(release, "cuda", 8, {}, **tables)
        assert context.nccl == TORCH_NCCL[tables["flags"]["pins"][release]["torch"]]
        assert {"NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_LEVEL", "NCCL_DEBUG", "NCCL_BUFFSIZE"} <= set(context.variables)


def test_a_newer_release_is_read_as_the_newest_known(tables):
    table = FlagTable(tables["flags"], "0.6.0")
    assert (table.exact, table.release) == (False, "0.5.23")
    assert FlagTable(tables["flags"], "0.5.1").release == "0.5.8.post1"


@pytest.mark.parametrize(
    ("flag", "given", "wanted"),
    [
        ("trust-remote-code", "false", False),
        ("trust-remote-code", "True", True),
        ("trust-remote-code", "no", False),
        ("trust-remote-code", 1, True),
        ("chunked-prefill-size", "8", 8),
        ("mem-fraction-static", "0.88", 0.88),
        ("mem-fraction-static", 1, 1.0),
        ("attention-backend", "triton", "triton"),
        ("chunked-prefill-size", False, False),
        ("model-loader-extra-config", {"b": 1, "a": True}, '{"a": true, "b": 1}'),
        ("lora-paths", "one", ["one"]),
        ("no-such-flag", "8", "8"),
    ],
)
def test_values_are_cast_to_the_declared_type(tables, flag, given, wanted):
    result = cast_flags({flag: given}, FlagTable(tables["flags"], "0.5.9"))[flag]
    assert result == wanted
    assert type(result) is type(wanted)


@pytest.mark.parametrize(
    ("record", "value", "says"),
    [
        ({"kind": "bare", "type": "str"}, "maybe", "takes no value"),
        ({"kind": "value", "type": "int"}, "8k", "takes an integer"),
        ({"kind": "value", "type": "int"}, "8.5", "takes an integer"),
        ({"kind": "value", "type": "float"}, "x", "takes a number"),
        ({"kind": "value", "type": "str"}, True, "takes a value"),
        ({"kind": "value", "type": "str"}, ["a"], "not a list"),
        ({"kind": "list", "type": "str"}, [], "at least one"),
        ({"kind": "value", "type": "str", "choices": ["a", "b"]}, "c", "takes one of a, b"),
    ],
)
def test_what_cannot_be_cast_is_said(record, value, says):
    with pytest.raises(ValueError, match=says):
        cast(value, record)
