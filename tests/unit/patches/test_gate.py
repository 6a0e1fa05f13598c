"""Gates evaluated under simulated hosts."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_patch_gate import BROKEN, HOSTS, GateError, admitted

IMPORTS = "from x import is_cuda, is_sm90_supported, is_sm120_supported, get_platform, get_device_capability, torch\n"


def returns(expression, before=""):
    source = f"{IMPORTS}{before}\ndef gate(n):\n    return {expression}\n"
    verdict = admitted(source, {"scope": "gate", "kind": "returns"})
    assert set(verdict) == set(HOSTS)
    return {host for host, value in verdict.items() if value is True}, BROKEN in verdict.values()


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("is_sm90_supported() and n > 0", {"9.0"}),
        ("(is_sm90_supported() or is_sm120_supported()) and n > 0", {"9.0", "12.0"}),
        ("get_platform().is_blackwell", {"10.0", "12.0"}),
        ("not is_cuda()", {"cpu", "amd-12.0"}),
        # A test of the major alone admits RDNA4, which the patch must never do.
        ("torch.cuda.get_device_capability()[0] == 12", {"12.0", "cpu", "amd-12.0"}),
        ("get_device_capability()[0] in (9, 12) and is_cuda()", {"9.0", "12.0"}),
        ("n == 1 or is_sm90_supported()", set(HOSTS)),
        ("is_sm90_supported() if is_cuda() else False", {"9.0"}),
        ("bool(is_sm120_supported())", {"12.0"}),
    ],
)
def test_admitted_hosts(expression, expected):
    assert returns(expression) == (expected, False)


def test_names_are_followed_through_the_module():
    facts = "_cuda = is_cuda()\n_a = _cuda and is_sm90_supported()\n"
    assert returns("_a and n", facts) == ({"9.0"}, False)


def test_an_alias_is_followed():
    assert returns("f()", "from x import is_sm120_supported as f\n") == ({"12.0"}, False)


def test_an_undefined_name_is_met_only_where_the_condition_gets_that_far():
    source = f"{IMPORTS}def gate():\n    return is_sm90_supported() or _missing\n"
    verdict = admitted(source, {"scope": "gate", "kind": "returns"})
    assert verdict["9.0"] is True
    assert verdict["12.0"] == BROKEN


def test_a_second_assignment_is_not_guessed():
    assert returns("_a", "_a = is_sm90_supported()\n_a = True\n") == (set(HOSTS), False)


@pytest.mark.parametrize(
    "source, gate, message",
    [
        ("def gate():\n    return 1\n", {"scope": "other", "kind": "returns"}, "other is defined 0 times"),
        ("def gate():\n    pass\n", {"scope": "gate", "kind": "returns"}, "a return in gate occurs 0 times"),
        ("def gate():\n    f(m=n)\n", {"scope": "gate", "kind": "majors", "text": "m"}, "is not a list of numbers"),
        ("def gate():\n    pass\n", {"scope": "gate", "kind": "bypass", "text": "ask"}, "'ask' is not in gate"),
    ],
)
def test_a_gate_that_is_not_there_is_an_error(source, gate, message):
    with pytest.raises(GateError, match=message.replace("(", r"\(")):
        admitted(source, gate)
