"""Which GPUs a gate in the engine's source admits, found by evaluating its condition and never by running the engine.

The evaluation is three-valued. Architecture tests (``is_sm120_supported()``, ``get_platform().is_sm90``, a capability
compared with numbers) are decided for a simulated host; everything else, such as a batch size, is unknown and counts as
favourable. Names are followed through the module's own assignments and imports, so a name that nothing defines is seen.
"""

from __future__ import annotations

import ast
import builtins
import functools
import operator

UNKNOWN = "unknown"
BROKEN = "broken"

#: label -> (vendor, compute capability). RDNA4 cards report 12.0 as well, hence the AMD host.
HOSTS = {
    "9.0": ("nvidia", (9, 0)),
    "10.0": ("nvidia", (10, 0)),
    "12.0": ("nvidia", (12, 0)),
    "8.6": ("nvidia", (8, 6)),
    "cpu": ("cpu", None),
    "amd-12.0": ("amd", (12, 0)),
}
#: The host that the SM120 patches are for.
TARGET = "12.0"

_MAJORS = {
    "is_sm90": (9,),
    "is_sm100": (10,),
    "is_sm120": (12,),
    "is_blackwell": (10, 11, 12),
}
_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


class GateError(ValueError):
    """The place that a gate description names is not there exactly once."""


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: The same text is looked at several times; nobody changes the tree.
parse = functools.lru_cache(maxsize=16)(ast.parse)


def _fact(name, host):
    """Return what the architecture test ``name`` answers on ``host``, or UNKNOWN for any other name."""
    vendor, capability = HOSTS[host]
    stem = name[: -len("_supported")] if name.endswith("_supported") else name
    if stem in _MAJORS:
        return vendor == "nvidia" and capability[0] in _MAJORS[stem]
    if stem in ("is_cuda", "is_hip"):
        return vendor == {"is_cuda": "nvidia", "is_hip": "amd"}[stem]
    if stem == "get_device_capability" and capability:
        return capability
    if stem == "get_device_sm":
        return capability[0] * 10 + capability[1] if vendor == "nvidia" else 0
    return UNKNOWN


def find_scope(tree, qualname):
    """Return the one class or function with this dotted name; ``<module>`` is the whole file.

    :raises GateError: there is none, or more than one.
    """
    if qualname == "<module>":
        return tree
    found = [tree]
    for name in qualname.split("."):
        found = [node for parent in found for node in _definitions(parent) if node.name == name]
    if len(found) != 1:
        raise GateError(f"{qualname} is defined {len(found)} times, expected once")
    return found[0]


def _definitions(parent):
    """Yield definitions directly in ``parent``, also below if, try and with, not inside other definitions."""
    # Expressions hold none, and most of a tree are expressions.
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        block = getattr(parent, field, [])
        for node in block if isinstance(block, list) else []:
            if isinstance(node, _DEFINITIONS):
                yield node
            else:
                yield from _definitions(node)


class _Names:
    """Bindings of a module and of one function in it, as far as they can be followed."""

    def __init__(self, tree, scope):
        self.values, self.imports, self.opaque = {}, {}, set(dir(builtins))
        self._collect(_flat(tree))
        if scope is not tree:
            arguments = scope.args
            every = arguments.args + arguments.posonlyargs + arguments.kwonlyargs
            every += [item for item in (arguments.vararg, arguments.kwarg) if item]
            self.opaque.update(item.arg for item in every)
            self._collect(_flat(scope))

    def _collect(self, nodes):
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    self.imports[alias.asname or alias.name.split(".")[0]] = alias.name
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.opaque.add(node.name)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                # A second assignment makes the value a matter of flow, which is not followed.
                self.opaque.add(name) if name in self.values else self.values.update({name: node.value})
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self.opaque.add(node.target.id)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in self.values:
                self.opaque.add(node.id)

    def original(self, name):
        """Return the imported name behind a local one; BROKEN where nothing binds it."""
        if name in self.imports:
            return self.imports[name]
        return name if name in self.opaque or name in self.values else BROKEN


@functools.lru_cache(maxsize=32)
def _flat(scope):
    """Return the nodes of a scope without those inside nested definitions, an assignment before its target."""
    found, left = [], [scope]
    while left:
        node = left.pop()
        found.append(node)
        if node is scope or not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            left += reversed(list(ast.iter_child_nodes(node)))
    return found[1:]


_names = functools.lru_cache(maxsize=32)(_Names)


def _evaluate(node, names, host, depth=0):
    """Return a Python value, UNKNOWN, or BROKEN where the host would meet a name that nothing defines."""
    if depth > 40:
        return UNKNOWN

    def sub(child):
        return _evaluate(child, names, host, depth + 1)

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id in names.values and node.id not in names.opaque:
            return sub(names.values[node.id])
        return BROKEN if names.original(node.id) == BROKEN else UNKNOWN
    if isinstance(node, ast.BoolOp):
        stop = isinstance(node.op, ast.Or)
        result = not stop
        for child in node.values:
            value = sub(child)
            if value == BROKEN:
                return BROKEN
            if value != UNKNOWN and bool(value) is stop:
                return stop
            result = UNKNOWN if value == UNKNOWN else result
        return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = sub(node.operand)
        return value if value in (UNKNOWN, BROKEN) else not value
    if isinstance(node, ast.Attribute):
        base = sub(node.value)
        return BROKEN if base == BROKEN else _fact(node.attr, host)
    if isinstance(node, ast.Call):
        return _call(node, names, host, sub)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        values = tuple(sub(child) for child in node.elts)
        return UNKNOWN if UNKNOWN in values or BROKEN in values else values
    if isinstance(node, ast.Subscript):
        base, index = sub(node.value), sub(node.slice)
        return base[index] if isinstance(base, tuple) and isinstance(index, int) and index < len(base) else UNKNOWN
    if isinstance(node, ast.IfExp):
        test = sub(node.test)
        return test if test in (UNKNOWN, BROKEN) else sub(node.body if test else node.orelse)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = sub(node.left), sub(node.comparators[0])
        compare = _COMPARE.get(type(node.ops[0]))
        if compare is None or {UNKNOWN, BROKEN} & {str(left), str(right)}:
            return UNKNOWN
        try:
            return compare(left, right)
        except TypeError:
            return UNKNOWN
    return UNKNOWN


def _call(node, names, host, sub):
    if isinstance(node.func, ast.Name):
        name = names.original(node.func.id)
        if name == "bool" and len(node.args) == 1:
            return sub(node.args[0])
        return BROKEN if name == BROKEN else _fact(name, host)
    if isinstance(node.func, ast.Attribute):
        base = sub(node.func.value)
        return BROKEN if base == BROKEN else _fact(node.func.attr, host)
    return UNKNOWN


def _one(items, what):
    if len(items) != 1:
        raise GateError(f"{what} occurs {len(items)} times, expected once")
    return items[0]


def _condition(gate, scope):
    """Return (expression, value that refuses) for the kinds that are one condition."""
    where, kind, text, test = gate["scope"], gate["kind"], gate.get("text", ""), gate.get("test", "")
    if kind == "returns":
        returns = [node for node in _flat(scope) if isinstance(node, ast.Return) and node.value is not None]
        return _one(returns, f"a return in {where}").value, False
    branches = [node for node in _flat(scope) if isinstance(node, ast.If)]
    if kind == "refuses":
        found = [
            node
            for node in branches
            if isinstance(node.body[-1], ast.Raise)
            and text in ast.unparse(node.body[-1])
            and test in ast.unparse(node.test)
        ]
        return _one(found, f"an if that raises {text!r} in {where}").test, True
    found = [
        node
        for node in branches
        if any(isinstance(item, (ast.Assign, ast.Return)) and text in ast.unparse(item) for item in node.body)
        and test in ast.unparse(node.test)
    ]
    return _one(found, f"an if around {text!r} in {where}").test, False


def _bypassed(gate, scope, names, host):
    """Tell whether ``host`` leaves the block before the statement with ``text``."""
    text = gate["text"]

    def walk(block):
        left = False
        for statement in block:
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], (ast.Continue, ast.Return)):
                left = left or _evaluate(statement.test, names, host) is True
            inner = [child for field in ("body", "orelse", "finalbody") for child in getattr(statement, field, [])]
            if inner and text in ast.unparse(inner):
                skipped = isinstance(statement, ast.If) and _evaluate(statement.test, names, host) is False
                return left or skipped or walk(inner)
            if text in ast.unparse(statement):
                return left
        raise GateError(f"{text!r} is not in {gate['scope']}")

    return walk(scope.body)


def admitted(source, gate):
    """Return ``{host label: True | False | "broken"}`` for one gate of a file.

    ``gate`` is ``{scope, kind, text, test}``; an if counts only when its condition contains ``test``. Kinds:

    - ``returns``: the scope's only return value admits
    - ``refuses``: an if that raises ``text``
    - ``enables``: an if whose body assigns or returns ``text``
    - ``majors``: a list of numbers given to the keyword ``text``
    - ``bypass``: the host does *not* reach the statement with ``text``

    :raises GateError: the place is not there exactly once.
    :raises SyntaxError: the source does not parse.
    """
    tree = parse(source)
    scope = find_scope(tree, gate["scope"])
    names = _names(tree, scope)
    if gate["kind"] == "majors":
        keywords = [node for node in ast.walk(scope) if isinstance(node, ast.keyword) and node.arg == gate["text"]]
        majors = _evaluate(_one(keywords, f"{gate['text']}= in {gate['scope']}").value, names, "cpu")
        if not isinstance(majors, tuple):
            raise GateError(f"{gate['text']}= in {gate['scope']} is not a list of numbers")
        return {label: vendor == "nvidia" and sm[0] in majors for label, (vendor, sm) in HOSTS.items()}
    if gate["kind"] == "bypass":
        return {host: _bypassed(gate, scope, names, host) for host in HOSTS}
    expression, refusal = _condition(gate, scope)
    values = {host: _evaluate(expression, names, host) for host in HOSTS}
    return {
        host: BROKEN if value == BROKEN else value == UNKNOWN or bool(value) is not refusal
        for host, value in values.items()
    }
