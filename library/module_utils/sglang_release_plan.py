"""Which release: pure decisions over manifests (see sglang_release_store), without touching the disk."""

from __future__ import annotations

import datetime
import hashlib

from ansible.module_utils.sglang_release_store import (
    VARIANT_PATTERN,
    ReleaseError,
    canonical,
    complete,
    promoted_at,
)

# Which of several releases of one digest is taken again: what has served well first, what was refused last.
_PREFERENCE = ("promoted", "active", "built", "retired", "rejected")


def digest(inputs, engine_fingerprint, model_fingerprint):
    """Return 12 hex digits over everything that determines behaviour; equal inputs give an equal digest."""
    text = canonical({"inputs": inputs, "engine": engine_fingerprint, "model": model_fingerprint})
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:12]


def new_id(variant, digest_text, taken=()):
    """Return ``<UTC time>-<variant>-<digest>``, an id out of none of ``taken``.

    :raises ReleaseError: the variant's name cannot be part of a directory's name.
    """
    if not VARIANT_PATTERN.match(variant or ""):
        raise ReleaseError(
            f"variant: {variant!r} cannot be part of a release id. Rule: letters, digits, '_', '.', '-', and a letter "
            "or digit first. Way out: rename the variant."
        )
    moment = datetime.datetime.now(datetime.timezone.utc)
    while True:
        release = f"{moment:%Y%m%dT%H%M%SZ}-{variant}-{digest_text}"
        if release not in taken:
            return release
        moment += datetime.timedelta(seconds=1)


def find(manifests, release):
    """Return the manifest of a release id, or null."""
    return next((item for item in manifests if item["id"] == release), None)


def candidates(manifests, digest_text, current):
    """Return the complete releases of a digest, best first: the current one, then by state, then the newest."""
    found = [item for item in manifests if item["digest"] == digest_text and complete(item)]
    found.sort(key=lambda item: item["id"], reverse=True)
    return sorted(found, key=lambda item: (item["id"] != current, _PREFERENCE.index(item["state"])))


def unfinished(manifests):
    """Return the ids of releases that were never sealed."""
    return [item["id"] for item in manifests if not complete(item)]


def last_promoted(manifests, excluded=()):
    """Return the manifest promoted most recently whose promotion stands, or null."""
    found = [item for item in manifests if complete(item) and promoted_at(item) and item["id"] not in excluded]
    return max(found, key=promoted_at, default=None)


def previous(manifests, current, planned):
    """Return the manifest that a failure of ``planned`` brings back: the current release where it is promoted, else the
    one promoted last; never the planned one, which has just failed. Null where there is none."""
    serving = find(manifests, current)
    if serving and serving["id"] != planned and complete(serving) and promoted_at(serving):
        return serving
    return last_promoted(manifests, (planned,))


def _listing(manifests, current):
    names = [f"{item['id']} ({item['state']})" for item in manifests if complete(item) and item["id"] != current]
    return "Releases that are complete and not serving: " + (", ".join(reversed(names)) or "none") + "."


def target(manifests, current, wanted="", allow_rejected=False):
    """Return the manifest that a rollback goes to.

    :param wanted: id given by the operator; empty: the release promoted last before the current one.
    :raises ReleaseError: there is none, or the one wanted may not be taken; the message lists the candidates.
    """
    listing = _listing(manifests, current)
    if not wanted:
        found = last_promoted(manifests, (current,))
        if not found:
            raise ReleaseError(
                "release: there is nothing to roll back to. Rule: only a promoted release other than the current one "
                f"is taken by itself. {listing} Way out: name one of them with release=<id>, or deploy a variant."
            )
        return found
    found = find(manifests, wanted)
    if not found:
        raise ReleaseError(f"release: {wanted} does not exist on this host or has no readable manifest. {listing}")
    if not complete(found):
        raise ReleaseError(f"release: {wanted} was never finished and cannot be started. {listing}")
    if wanted == current:
        raise ReleaseError(f"release: {wanted} is the current release already. {listing}")
    if found["state"] == "rejected" and not allow_rejected:
        raise ReleaseError(
            f"release: {wanted} was rejected: {found['history'][-1]['reason'] or 'no reason was recorded'}. {listing} "
            "Way out: take another one, or add -e sglang_release_allow_rejected=true."
        )
    return found


def prunable(manifests, keep, protected):
    """Return the ids to delete: what was never finished, and complete releases beyond the newest ``keep``.

    :param protected: ids that stay whatever their age; they count among the newest.
    """
    whole = [item["id"] for item in manifests if complete(item)]
    beyond = whole[: max(0, len(whole) - keep)]
    return [release for release in unfinished(manifests) + beyond if release not in protected]
