"""The catalogue that is delivered: complete, documented, and right on every release."""

from __future__ import annotations

import json
import time

import pytest
from ansible.module_utils import sglang_lint, sglang_variant_patches, sglang_variant_resolve
from ansible.module_utils.sglang_findings import errors
from ansible.module_utils.sglang_variant_schema import ENTRY

NAMES = {
    "baseline", "tree", "tree_allreduce", "fewchan", "manychan", "proto_all", "proto_auto", "p2p_off", "graph_xml",
    "fusion", "fewchan_fusion", "pcie_ipc", "mscclpp", "torch_symm_mem", "custom_all_reduce", "eagle3",
    "eagle3_aqmedai", "eagle3_mla", "ngram", "eagle3_fewchan_fusion",
}  # fmt: skip
RELEASES = (
    "0.5.8.post1", "0.5.9", "0.5.10.post1", "0.5.11", "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.15.post1",
    "0.5.16", "0.5.18", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip
BASE = {"args": {"mem-fraction-static": 0.88, "disable-custom-all-reduce": True, "trust-remote-code": True}}
LAUNCH = {"host": "127.0.0.1", "port": 8000, "model_path": "/models/Kimi-K2.5", "has_api_key": False, "gpu_count": 8}
FUSED = {"fusion", "fewchan_fusion", "eagle3_fewchan_fusion"}
SPECULATIVE = {"eagle3", "eagle3_aqmedai", "eagle3_fewchan_fusion"}


def refusals(name, release):
    """Return the rules that must refuse one variant on one release of an eight-GPU SM120 host, from the facts."""
    order = RELEASES.index(release)
    rules = set()
    if release == "0.5.8.post1":
        rules.add("engine-model")
    if name == "tree":
        rules.add("nccl-algo-collective")
    if name in FUSED:
        rules |= {"fusion-gate"} if order < RELEASES.index("0.5.18") else set()
        rules |= {"engine-range"} if order < RELEASES.index("0.5.9") else set()
    if name in SPECULATIVE and order < RELEASES.index("0.5.10.post1"):
        rules |= {"engine-range", "spec-engine"}
    if name == "eagle3_mla":
        rules |= {"engine-range"} if order < RELEASES.index("0.5.12.post1") else set()
        rules |= {"spec-engine"} if order < RELEASES.index("0.5.10.post1") else set()
    if name == "pcie_ipc" and order < RELEASES.index("0.5.22"):
        rules |= {"engine-range", "env-unread"}
    return rules


@pytest.fixture(scope="module")
def judge(repository, catalogue):
    """Return ``judge(name, release, device)``, the findings of one variant on one release."""
    folder = repository / "plugins/data"
    tables = {
        "flags": json.loads((folder / "sglang_flags.json").read_text()),
        "nccl": json.loads((folder / "nccl_variables.json").read_text()),
    }

    def run(name, release, device="cuda", tp=8, launch=LAUNCH):
        variant, _unset = sglang_variant_resolve.resolve(name, catalogue, BASE, {}, release)
        patches = sglang_variant_patches.load(variant["patches"], repository / "roles/sglang_patches/files")
        return sglang_lint.lint(variant, patches, sglang_lint.Context(release, device, tp, launch, **tables))[1]

    return run


def test_it_has_every_variant_of_the_campaign(catalogue):
    assert set(catalogue) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_is_refused_where_it_must_be_and_nowhere_else(judge, name):
    seen = {release: {item["rule"] for item in errors(judge(name, release))} for release in RELEASES}
    assert seen == {release: refusals(name, release) for release in RELEASES}


@pytest.mark.parametrize("name", ["baseline", "fewchan", "fusion", "fewchan_fusion"])
def test_the_embedded_node_takes_the_four_of_the_campaign(judge, name):
    assert errors(judge(name, "0.5.9", "cpu", 2, {"host": "127.0.0.1", "model_path": "/m/tiny"})) == []


def test_no_value_is_lost_or_shared_between_entries(catalogue):
    """One factor: what an entry sets itself differs from what its parents give."""
    for name, entry in catalogue.items():
        if entry.get("factor") is None or not entry.get("extends"):
            continue
        own, _patches = sglang_variant_resolve.layer(entry, "0.5.22")
        parents = {}
        for parent in entry["extends"]:
            parents.update(sglang_variant_resolve.compose(parent, catalogue, "0.5.22")[0])
        assert own, name
        assert [path for path, value in own.items() if path in parents and parents[path][0] == value] == []


def test_the_whole_catalogue_on_every_release_takes_less_than_two_seconds(judge):
    start = time.process_time()
    for release in RELEASES:
        for name in sorted(NAMES):
            judge(name, release)
    assert time.process_time() - start < 2


def keys(options, prefix=""):
    """Yield the rows of the table of keys in docs/variants.md, without their meaning."""
    for key, option in options.items():
        kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
        yield f"| `{prefix}{key}` | {kind} | {'yes' if option.get('required') else 'no'} | "
        if "options" in option:
            yield from keys(option["options"], f"{prefix}{key}" + ("[]." if option["type"] == "list" else "."))


def test_the_page_shows_every_key_and_every_variant(repository, catalogue):
    text = (repository / "docs/variants.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    wanted = list(keys(ENTRY))
    assert [row[: len(start)] for row, start in zip(rows, wanted)] == wanted
    assert [row.split("`")[1] for row in rows[len(wanted) :]] == list(catalogue)
