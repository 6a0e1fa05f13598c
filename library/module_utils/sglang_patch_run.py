"""Bring a release's ``site`` folder to a list of catalogue entries: judge all, then write."""

from __future__ import annotations

import copy
import os

from ansible.module_utils import sglang_patch_site as site_files
from ansible.module_utils import sglang_patching as patching


def reconcile(params, check_mode):
    """Do what the module ``sglang_patch`` documents.

    :param params: the module's parameters, see its documentation.
    :returns: ``{changed, results, packages, record, diff, warn, failed}``; ``failed`` is the message of a refusal, or
        ``""``, ``warn`` what was done to the copies by hand.
    :raises EntryError: an entry is malformed. :raises SiteError: interpreter or file system.
    """
    site = os.path.abspath(params["site"])
    entries, gone = _wanted_entries(params, site_files.read_record(site))
    if not os.path.exists(params["python"]) and (entries or params["state"] == "present"):
        return _without_engine(params, check_mode, site, entries)
    packages = {entry["package"]: entry["distribution"] for entry in entries}
    chdir = params["chdir"] if params["chdir"] and (os.path.isdir(params["chdir"]) or not check_mode) else None
    env = {key: str(value) for key, value in params["env"].items()}
    origins = site_files.locate(params["python"], packages, env, chdir, site) if packages else {}
    results, texts = _judge_all(params, entries, origins)
    answer = {
        "changed": False,
        "results": results + gone,
        "packages": {},
        "record": os.path.join(site, site_files.RECORD),
        "warn": [],
    }
    failed = [item for item in results if not item["ok"]]
    if failed:
        return {**answer, "diff": [], "failed": _failure(failed)}
    kept = {item["package"] for item in results if item["state"] in patching.GOOD}
    record = {"schema": 1, "packages": {}, "entries": []}
    before = site_files.read_record(site)
    stale = [package for package in before["packages"] if package not in kept]
    for package in sorted(kept):
        changed, state, note = _bring(params, check_mode, site, package, origins[package], texts[package], env, chdir)
        answer["warn"] += [f"{os.path.join(site, package)}: {note}"] * bool(note)
        for item in results:
            if item["package"] == package and item["state"] in patching.GOOD:
                applied = not changed and item["state"] == "applied"
                notes = ["applied before by this release" if applied else note, item["message"]]
                item["message"] = "; ".join(filter(None, notes))
                item["state"] = "already_applied" if applied else item["state"]
        answer["changed"] = answer["changed"] or changed
        answer["packages"][package] = os.path.join(site, package)
        record["packages"][package] = state
    for package in stale:
        answer["changed"] = True
        if not check_mode:
            site_files.remove(site, package)
    record["entries"] = [
        {"entry": entry, **{key: item[key] for key in _KEPT}}
        for entry, item in zip(entries, results)
        if item["state"] in patching.GOOD
    ]
    if record != before:
        answer["changed"] = True
        if not check_mode:
            site_files.write_record(site, record)
    answer["diff"] = _diff(results, before, answer["changed"]) + [
        {"before_header": os.path.join(site, package), "after_header": "absent", "prepared": f"removed {package}\n"}
        for package in stale
    ]
    return answer


def verdicts(params, ask):
    """Return the ``results`` of :func:`reconcile` for a release that is not there yet, without looking further than at
    what the entries name.

    :param params: ``{python, env, site, entries, engine_version, capabilities, allow_experimental, state}``.
    :param ask: ``(python, packages, env)`` -> ``packages`` of :func:`sglang_patch_site.ask`.
    :raises EntryError: an entry is malformed. :raises SiteError: interpreter.
    """
    entries, _gone = _wanted_entries(params, {"entries": []})
    if not os.path.exists(params["python"]):
        return _without_engine(params, True, params["site"], entries)["results"]
    packages = {entry["package"]: entry["distribution"] for entry in entries}
    origins = site_files.origins(ask(params["python"], packages, params["env"]), params["python"])
    return _judge_all(params, entries, origins)[0]


_KEPT = ("name", "edition", "digest", "package", "version", "origin", "files", "admitted", "hunks")


def _wanted_entries(params, record):
    """Return (entries the site must hold, results of entries that go away)."""
    for entry in params["entries"]:
        patching.validate(entry)
    if params["state"] == "present":
        patching.check_requires(params["entries"])
        return params["entries"], []
    names = [entry["name"] for entry in params["entries"]]
    gone = [patching.result(entry, "absent") for entry in params["entries"]]
    return [item["entry"] for item in record["entries"] if item["name"] not in names], gone


def _without_engine(params, check_mode, site, entries):
    """Show the declared texts; only a dry run may meet a host without the engine."""
    if not check_mode:
        raise site_files.SiteError(f"python {params['python']} does not exist: install the engine first")
    results = []
    for entry in entries:
        if entry["package"] != "sglang":
            note = f"declared: {entry['package']} is judged when the engine is installed"
            results.append(patching.result(entry, "not_exercised", note, ok=True))
        elif not params["engine_version"]:
            raise patching.EntryError("engine_version must be given where the engine is not installed yet")
        else:
            results.append(patching.declared(entry, params["engine_version"]))
    failed = [item for item in results if not item["ok"]]
    packages = sorted({item["package"] for item in results if item["state"] == "applied"})
    return {
        "changed": bool(packages),
        "results": results,
        "packages": {package: os.path.join(site, package) for package in packages},
        "record": os.path.join(site, site_files.RECORD),
        "diff": [{"prepared": item["hunks"]} for item in results if item["hunks"]],
        "failed": _failure(failed) if failed else "",
    }


def _judge_all(params, entries, origins):
    """Judge the entries in order on pristine texts and return (results, ``{package: {path: (pristine, new)}}``)."""
    results, texts = [], {}
    for entry in entries:
        package, origin = entry["package"], origins[entry["package"]]
        if origin is None:
            note = f"not exercised: {package} is not installed in {params['python']}"
            results.append(patching.result(entry, "not_exercised", note))
            continue
        found = texts.setdefault(package, {})
        family = patching.family_of(entry, origin["version"])
        for path in patching.paths(family) if family else []:
            pristine = site_files.read_text(os.path.join(origin["origin"], path))
            found.setdefault(path, (pristine, pristine))
        item, changes = _judge(entry, origin["version"], {path: pair[1] for path, pair in found.items()})
        item["origin"] = origin["origin"]
        if (changes and entry.get("experimental")) or (item["state"] in patching.GOOD and family.get("refused")):
            item, changes = _held_back(params, entry, family, item, changes)
        for path, text in changes.items():
            found[path] = (found[path][0], text)
        results.append(item)
    return results, texts


_JUDGED = {}


def _judge(entry, version, texts):
    """Return what ``patching.judge`` does; one process that checks a host and then builds on it judges once."""
    key = (patching.digest(entry), version, tuple(sorted(texts.items())))
    if key not in _JUDGED:
        _JUDGED[key] = patching.judge(entry, version, texts)
    return copy.deepcopy(_JUDGED[key])


def _held_back(params, entry, family, item, changes):
    """Return the result and changes of an entry that is experimental, or for a release that it cannot help."""
    keep = {key: item[key] for key in ("version", "origin", "family")}
    sm = params["capabilities"]
    if sm and not any(value.split(".")[0] == "12" for value in sm):
        note = f"not exercised: this host has no GPU of compute capability 12 (it has {', '.join(sm)})"
        return patching.result(entry, "not_exercised", note, **keep), {}
    if family.get("refused"):
        note = f"{entry['package']} {item['version']} {family['refused']}"
    elif params["allow_experimental"]:
        return item, changes
    else:
        admitted = item["gates"][0]["before"]
        note = f"{entry['package']} {item['version']} admits {', '.join(admitted)} and refuses 12.0; "
        note += "the patch that opens it is experimental"
    ways_out = family.get("ways_out") or entry.get("ways_out") or ["allow experimental patches"]
    note += f". Ways out: {'; or '.join(ways_out)}"
    return patching.result(entry, "refused", note, ways_out=ways_out, **keep), {}


def _failure(failed):
    return "No patch was applied. " + " | ".join(
        f"{item['name']}: {item['state']}: {item['message']}" for item in failed
    )


def _bring(params, check_mode, site, package, origin, texts, env, chdir):
    """Make the copy of one package right and return (changed, its part of the record, what was done to the copy)."""
    patched = {path: new for path, (old, new) in texts.items() if new != old}
    files = site_files.tree(origin["origin"])
    state = {
        **origin,
        "fingerprint": site_files.fingerprint(files),
        "files": {path: site_files.sha256(text) for path, text in patched.items()},
        "pristine": {path: site_files.sha256(texts[path][0]) for path in patched},
    }
    target = os.path.join(site, package)
    recorded = site_files.read_record(site)["packages"].get(package)
    found = site_files.deviations(target, files, state["files"]) if recorded == state else []
    if recorded == state and not found:
        return False, state, ""
    if not check_mode:
        site_files.build(params["python"], env, chdir, origin["origin"], target, patched)
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return True, state, f"the copy is made again: {', '.join(found[:3])}{more}" if found else ""


def _diff(results, before, changed):
    """Return one prepared diff per entry that is new or changed."""
    if not changed:
        return []
    known = {item["name"]: item["hunks"] for item in before["entries"]}
    return [
        {"prepared": item["hunks"]} for item in results if item["hunks"] and known.get(item["name"]) != item["hunks"]
    ]
