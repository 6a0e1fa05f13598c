"""The catalogue against reduced shapes of every family, and what is recognised."""

from __future__ import annotations

import copy

import pytest
import shapes
from ansible.module_utils import sglang_patching as patching

PATCHED = ["9.0", "10.0", "12.0"]
GUARD = "srt/layers/communicator.py"
ARGS = "srt/server_args.py"
OLD = "(_is_sm90_supported or _is_sm100_supported)"
SED = "(_is_sm90_supported or _is_sm100_supported or _is_sm120_supported)"
#: What the old one-line patch did to the two files of 0.5.9.
BY_SED = {
    GUARD: shapes.guard(shapes.FUNCTIONS).replace(OLD, SED, 1),
    ARGS: shapes.SGLANG["0.5.9"][ARGS].replace(
        "and (is_sm90_supported() or is_sm100_supported())",
        "and (is_sm90_supported() or is_sm100_supported() or is_sm120_supported())",
    ),
}
#: The same, with the import and the definition that it forgot.
COMPLETE = {
    **BY_SED,
    GUARD: BY_SED[GUARD]
    .replace("    is_sm100_supported,\n", "    is_sm100_supported,\n    is_sm120_supported,\n")
    .replace("\nLIMIT", "\n_is_sm120_supported = is_sm120_supported() and _is_cuda\nLIMIT"),
}


@pytest.mark.parametrize("version", shapes.SGLANG)
def test_every_family_is_completed_and_only_sm120_changes(version, entries):
    result, changes = patching.judge(entries[0], version, shapes.SGLANG[version])
    assert (result["state"], result["admitted"], result["message"]) == ("applied", PATCHED, "")
    assert sorted(changes) == result["files"] == sorted(shapes.SGLANG[version].keys() - unpatched(version))
    for gate in result["gates"]:
        assert gate["after"] == (["12.0"] if gate["kind"] == "bypass" else PATCHED)
        assert gate["before"] == [host for host in gate["after"] if host != "12.0"]
    again, more = patching.judge(entries[0], version, {**shapes.SGLANG[version], **changes})
    assert (again["state"], more, again["hunks"]) == ("already_applied", {}, "")


def unpatched(version):
    """The condition of 0.5.17 and 0.5.18 that only looks like the switch."""
    return {ARGS} if version == "0.5.18" else set()


@pytest.mark.parametrize(
    "version, family",
    [
        ("0.5.8", "guard and server_args"),
        ("0.5.8.post1", "guard and server_args"),
        ("0.5.9", "guard and server_args"),
        ("0.5.10.post1", "guard and server_args"),
        ("0.5.11", "multicast preflight"),
        ("0.5.13.post1", "multicast preflight"),
        ("0.5.14", "backend resolver"),
        ("0.5.15.post1", "overrides"),
        ("0.5.16", "overrides"),
        ("0.5.17", "overrides and a look-alike"),
        ("0.5.18", "overrides and a look-alike"),
        ("0.5.19", "platform object"),
        ("0.5.20", "platform object"),
        ("0.5.21", "moved guard"),
        ("0.5.22", "renamed guard"),
        ("0.5.23", "renamed guard"),
        ("0.5.7", None),
        ("0.5.24", None),
    ],
)
def test_family_of_a_version(version, family, entries):
    found = patching.family_of(entries[0], version)
    assert (found and found["name"]) == family


def test_a_version_that_is_not_covered_says_which_are(entries):
    result, changes = patching.judge(entries[0], "0.5.7", {})
    assert (result["state"], result["ok"], changes) == ("not_applicable", False, {})
    assert ">=0.5.8,<0.5.11" in result["message"]
    assert ">=0.5.22,<0.5.24" in result["versions_covered"]


def test_the_old_sed_is_seen_as_incomplete_and_completed(entries):
    result, changes = patching.judge(entries[0], "0.5.9", BY_SED)
    assert result["state"] == "applied"
    assert list(changes) == [GUARD]
    assert "incomplete: added import of is_sm120_supported, definition of _is_sm120_supported" in result["message"]
    assert "_is_sm120_supported = _is_cuda and is_sm120_supported()" in changes[GUARD]


#: What the old patch looked for in server_args.py, which in 0.5.17 and 0.5.18 is the choice for embedding models.
SWITCH = "and (is_sm90_supported() or is_sm100_supported())"


@pytest.mark.parametrize(
    "edit, seen",
    [
        (SWITCH[:-1] + " or is_sm120_supported())", "it admits 9.0, 10.0, 12.0, as released 9.0, 10.0"),
        ("and (is_sm90_supported() or _is_sm120_supported)", "it admits 9.0 and meets an undefined name, as released"),
        ("", "it admits 9.0, 10.0, 12.0, 8.6, as released 9.0, 10.0"),
    ],
    ids=["sed", "undefined", "removed"],
)
def test_the_old_sed_in_the_wrong_place_is_said_and_not_copied(edit, seen, entries):
    files = shapes.SGLANG["0.5.18"]
    files = {**files, GUARD: files[GUARD].replace(OLD, SED, 1), ARGS: files[ARGS].replace(SWITCH, edit)}
    result, changes = patching.judge(entries[0], "0.5.18", files)
    assert (result["state"], result["ok"], changes, result["hunks"]) == ("conflict", False, {}, "")
    place = "sglang/srt/server_args.py: edited by hand in ServerArgs._handle_model_capability_adjustments, which leaves"
    for words in (place, seen, "communicator.py was patched by hand and incomplete: added import", ". Ways out: take"):
        assert words in result["message"]
    assert result["ways_out"] == ["take that edit back in the engine", "install sglang 0.5.18 anew"]


def test_a_watched_place_that_is_not_there_has_no_edit(entries):
    for args in (None, "", "class ServerArgs:\n    pass\n"):
        result, _changes = patching.judge(entries[0], "0.5.18", {**shapes.SGLANG["0.5.18"], ARGS: args})
        assert (result["state"], result["ok"]) == ("applied", True)
    result, _changes = patching.judge(entries[0], "0.5.18", {**shapes.SGLANG["0.5.18"], ARGS: "def ("})
    assert (result["state"], "sglang/srt/server_args.py: " in result["message"]) == ("conflict", True)


def test_a_watched_place_has_a_shape(entries):
    family = next(family for family in entries[0]["families"] if "watch" in family)
    for change, message in (
        ({"what": ""}, "watch[0].what is missing or empty"),
        ({"find": "x"}, "unknown key find"),
        ({"path": "../x.py"}, "leaves the package"),
    ):
        entry = {**entries[0], "families": [{**family, "watch": [{**family["watch"][0], **change}]}]}
        with pytest.raises(patching.EntryError) as error:
            patching.validate(entry)
        assert message in str(error.value)


def test_a_complete_patch_by_hand_is_left_alone(entries):
    result, changes = patching.judge(entries[0], "0.5.9", COMPLETE)
    assert (result["state"], changes) == ("already_applied", {})
    assert "by hand" in result["message"]


def test_a_patch_by_hand_that_admits_other_cards_is_a_conflict(entries):
    wide = {**COMPLETE, GUARD: COMPLETE[GUARD].replace("= is_sm120_supported() and _is_cuda", "= True")}
    result, changes = patching.judge(entries[0], "0.5.9", wide)
    assert (result["state"], changes) == ("conflict", {})
    assert "would admit 9.0, 10.0, 12.0, 8.6, cpu, amd-12.0" in result["message"]


@pytest.mark.parametrize(
    "gate",
    [
        "(_is_sm90_supported or get_platform().is_blackwell)",
        "(_is_sm90_supported or _is_sm100_supported or get_platform().is_sm120)",
        "((_is_sm90_supported or _is_sm100_supported) or get_platform().is_sm120)",
    ],
)
def test_a_fix_upstream_in_other_words_is_never_touched(gate, entries):
    text = shapes.guard(shapes.PLATFORM).replace(OLD, gate, 1)
    files = {**shapes.SGLANG["0.5.20"], GUARD: text}
    files.update({path: new for path, new in patched("0.5.20", entries[0]).items() if path != GUARD})
    result, changes = patching.judge(entries[0], "0.5.20", files)
    assert (result["state"], result["ok"], changes) == ("upstream", False, {})
    assert "other words" in result["message"]


def patched(version, entry):
    """Return the changed files of a shape."""
    return patching.judge(entry, version, shapes.SGLANG[version])[1]


def test_one_file_that_does_not_fit_keeps_all_files_as_they_are(entries):
    files = {**shapes.SGLANG["0.5.14"], ARGS: shapes.SGLANG["0.5.14"][ARGS].replace("and (is_sm90", "and(is_sm90")}
    result, changes = patching.judge(entries[0], "0.5.14", files)
    assert (result["state"], changes, result["hunks"]) == ("conflict", {}, "")
    assert (
        "sglang/srt/server_args.py: the text 'and (is_sm90_supported() or is_sm100_supported())' occurs 0"
        in (result["message"])
    )


def test_a_missing_file_and_one_that_does_not_parse_are_conflicts(entries):
    missing, _none = patching.judge(entries[0], "0.5.9", {**shapes.SGLANG["0.5.9"], GUARD: None})
    broken, _none = patching.judge(entries[0], "0.5.9", {**shapes.SGLANG["0.5.9"], GUARD: "def ("})
    assert missing["state"] == broken["state"] == "conflict"
    assert "communicator.py: no such file" in missing["message"]


def test_an_entry_that_forgets_the_definition_is_refused(entries):
    entry = copy.deepcopy(entries[0])
    entry["families"][0]["files"][0]["definitions"] = []
    result, changes = patching.judge(entry, "0.5.9", shapes.SGLANG["0.5.9"])
    assert (result["state"], changes) == ("conflict", {})
    assert "undefined names after patching: _is_sm120_supported" in result["message"]


def test_an_entry_that_tests_the_major_alone_is_refused(entries):
    entry = copy.deepcopy(entries[0])
    text = "import torch\n\n_is_sm120_supported = torch.cuda.get_device_capability()[0] == 12"
    entry["families"][0]["files"][0]["definitions"][0]["text"] = text
    result, _none = patching.judge(entry, "0.5.9", shapes.SGLANG["0.5.9"])
    assert result["state"] == "conflict"
    assert "amd-12.0" in result["message"]


def test_flashinfer_gate_is_opened_or_seen_as_open(entries):
    old, changes = patching.judge(entries[1], "0.6.3", shapes.FLASHINFER["0.6.3"])
    new, none = patching.judge(entries[1], "0.6.17", shapes.FLASHINFER["0.6.17"])
    assert (old["state"], old["admitted"], new["state"], new["ok"], none) == ("applied", PATCHED, "upstream", True, {})
    assert changes["jit/comm.py"].count("[9, 10, 12]") == 1


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda e: e.pop("families"), "families is missing"),
        (lambda e: e.update(edition="1"), "edition must be of type int"),
        (lambda e: e.update(edition=True), "edition must be of type int"),
        (lambda e: e.update(verions=[]), "unknown key verions"),
        (lambda e: e["families"][0].update(versions="0.5.9"), "'0.5.9' is not a version range"),
        (lambda e: e["families"][0].update(versions=">=new"), "'new' is not a version"),
        (lambda e: e["families"][0]["files"][0].update(path="../x.py"), "leaves the package"),
        (lambda e: e["families"][0]["files"][0].update(gates=[]), "gates is missing or empty"),
        (lambda e: e["families"][0]["files"][0]["edits"][0].pop("find"), "edits[0].find is missing"),
        (lambda e: e["families"][0]["files"].append("x"), "must be a mapping"),
    ],
)
def test_a_malformed_entry_is_refused_by_key(change, message, entries):
    entry = copy.deepcopy(entries[1])
    change(entry)
    with pytest.raises(patching.EntryError) as error:
        patching.validate(entry)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "names, message",
    [
        (["sm120_allreduce_fusoin"], "did you mean sm120_allreduce_fusion"),
        (["x"], "the catalogue has flashinfer_sm120_gate, sm120_allreduce_fusion"),
        (["sm120_allreduce_fusion"], "requires flashinfer_sm120_gate"),
        (["flashinfer_sm120_gate", "flashinfer_sm120_gate"], "named twice"),
    ],
)
def test_names_are_checked_on_the_controller(names, message, catalogue):
    with pytest.raises(patching.EntryError, match=message):
        patching.load_entries(names, catalogue)


def test_digest_follows_the_content(entries):
    changed = {**entries[0], "edition": 2}
    assert patching.digest(entries[0]) == entries[0]["digest"]
    assert patching.digest(changed) != entries[0]["digest"]


def test_versions_sort_as_pep_440_orders_them():
    ordered = ["0.5.9.dev1", "0.5.9rc1", "0.5.9", "0.5.9.post1", "0.5.10", "0.6", "0.6.1"]
    shuffled = ordered[::2] + ordered[1::2]
    assert sorted(shuffled, key=patching.version_key) == ordered
    assert patching.version_key("0.6") == patching.version_key("0.6.0+cu130")
    assert patching.covers("!=0.5.9", "0.5.9") is False
    assert patching.covers(">0.5.8,<=0.5.9", "0.5.9") is True
