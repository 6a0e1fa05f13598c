"""Known answers and the soak: what a server must say, and that it goes on saying it."""

from __future__ import annotations

import time

from ansible.module_utils.sglang_client import Call, ClientError
from ansible.module_utils.sglang_findings import finding
from ansible.module_utils.sglang_watch_wait import PROMPTS, degenerate

RUNG = "verify"
# Expectations of which each known answer needs one.
EXPECTED = ("tokens", "text", "contains")
ADVICE = (
    "treat the patches, kernels and quantisation of this variant as broken; where the model itself is another one, "
    "record its answers anew"
)


def unusable(params):
    """Return which input cannot be used and why, or an empty text.

    :param params: ``{known_answers, match, max_tokens, soak_concurrency, soak_tokens}``.
    """
    for number, known in enumerate(params["known_answers"]):
        if not any(known[key] for key in EXPECTED):
            return f"known_answers[{number}] ({known['prompt']!r}) expects nothing: give one of {', '.join(EXPECTED)}."
    if not 0 <= params["match"] <= 1:
        return f"match must be between 0 and 1, not {params['match']:g}."
    for name in ("max_tokens", "soak_concurrency", "soak_tokens"):
        if params[name] < 1:
            return f"{name} must be at least 1, not {params[name]}."
    return ""


def leading(expected, actual):
    """Return how many items at the start of two lists are equal."""
    count = 0
    for one, two in zip(expected, actual):
        if one != two:
            break
        count += 1
    return count


def compare(known, answer, match, tolerance):
    """Compare one answer with what is known.

    :param known: ``{prompt, tokens, text, contains, logprobs, min_logprob}``; None where nothing is expected.
    :param answer: ``{text, ids, logprobs}``; an empty list of log-probabilities means that the server gave none.
    :param match: share of the expected tokens (words where no tokens are known) that must agree from the start, 0 to 1.
    :param tolerance: largest difference of a log-probability, in nats.
    :returns: ``(what is wrong or an empty text, agreeing tokens or None, largest difference or None)``.
    """
    wrong, agreed, deviation = "", None, None
    if known["contains"] and known["contains"].lower() not in answer["text"].lower():
        wrong = f"it does not contain {known['contains']!r}"
    if known["tokens"] or known["text"]:
        expected = known["tokens"] or known["text"].split()
        agreed = leading(expected, answer["ids"] if known["tokens"] else answer["text"].split())
        if agreed < match * len(expected):
            unit = "tokens" if known["tokens"] else "words"
            wrong = f"{agreed} of {len(expected)} {unit} agree, {match:.0%} must"
    logprobs = answer["logprobs"][: agreed if known["tokens"] else None]
    if known["logprobs"] and logprobs and not wrong:
        deviation = max(abs(one - two) for one, two in zip(known["logprobs"], logprobs))
        if deviation > tolerance:
            wrong = f"a log-probability differs by {deviation:.3f}, at most {tolerance:g} may be"
    if known["min_logprob"] is not None and logprobs and not wrong and min(logprobs) < known["min_logprob"]:
        wrong = f"a log-probability is {min(logprobs):.3f}, at least {known['min_logprob']:g} must be"
    return wrong, agreed, deviation


def ask(client, known, max_tokens, limit):
    """Return the answer to a known question, with log-probabilities where the server gives them.

    :param max_tokens: tokens of the answer where the expectation has no length of its own.
    :param limit: seconds.
    :raises ClientError: the server gave no answer.
    """
    count = len(known["tokens"] or ()) or max_tokens
    try:
        return Call(client.generate, known["prompt"], count, limit, True, limit=limit).wait()
    except ClientError as problem:
        if problem.kind != "http":
            raise
        # Not every engine can give log-probabilities, with speculation for example.
        return Call(client.generate, known["prompt"], count, limit, limit=limit).wait()


def known_answers(client, params):
    """Ask every known question; return ``(findings, answers)``.

    :param params: ``{known_answers, match, logprob_tolerance, max_tokens, generation_timeout}``; nats, seconds.

    Answers are ``{prompt, text, tokens, logprobs, agreed, deviation, elapsed}``, ``tokens`` being token ids: what a
    later expectation is written from.
    """
    findings, answers = [], []
    if not params["known_answers"]:
        text = "No known answer is declared, so a model that answers fluently and wrongly passes."
        advice = "give known_answers, written from the record of a release that is trusted"
        findings.append(finding(RUNG, "known-answer", "warning", text, "", advice))
    for known in params["known_answers"]:
        try:
            answer = ask(client, known, params["max_tokens"], params["generation_timeout"])
            wrong, agreed, deviation = compare(known, answer, params["match"], params["logprob_tolerance"])
        except ClientError as problem:
            findings.append(
                finding(
                    RUNG, "known-answer", "error", f"{known['prompt']!r} was not answered.", problem, "read the log"
                )
            )
            continue
        answers.append(
            {
                "prompt": known["prompt"],
                "text": answer["text"],
                "tokens": answer["ids"],
                "logprobs": [round(value, 4) for value in answer["logprobs"]],
                "agreed": agreed,
                "deviation": None if deviation is None else round(deviation, 4),
                "elapsed": answer["elapsed"],
            }
        )
        if wrong:
            expected = known["text"] or known["contains"] or known["tokens"]
            message = f"The answer to {known['prompt']!r} is not the known one: {wrong}."
            evidence = f"expected {expected!r}, got {answer['text']!r}"
            findings.append(finding(RUNG, "known-answer", "error", message, evidence, ADVICE))
    return findings, answers


def soak(client, died, requests, concurrency, max_tokens, limit):
    """Send more requests than any warm-up; return ``(answered, why it stopped or an empty text)``.

    :param died: function that returns what died among the server's processes, or None.
    :param concurrency: requests under way at one time.
    :param max_tokens: tokens of each answer.
    :param limit: seconds for each request.
    """
    running, sent, answered = [], 0, 0
    while answered < requests:
        while len(running) < concurrency and sent < requests:
            prompt = f"Count on from {sent}: {sent}, {sent + 1}, {sent + 2},"
            running.append(Call(client.generate, prompt, max_tokens, limit, limit=limit))
            sent += 1
        dead = died()
        if dead:
            return answered, dead[1]
        try:
            waiting = [call for call in running if not call.finished()]
        except ClientError as problem:
            return answered, str(problem)
        answered += len(running) - len(waiting)
        running = waiting
        time.sleep(0.005)
    return answered, ""


def still_healthy(client, max_tokens, min_distinct, limit):
    """Return why a server is not well after the soak, or an empty text.

    A real generation says more than ``/health``, which takes a whole second on SGLang 0.5.9.
    """
    try:
        answer = Call(client.generate, PROMPTS[0], max_tokens, limit, limit=limit).wait()
    except ClientError as problem:
        return str(problem)
    reason = degenerate(answer, min_distinct)
    return f"{reason}: {answer['text'][:200]!r}" if reason else ""


def run_soak(client, died, params):
    """Soak the server and look whether it is well after it; return ``(findings, {requests, answered, elapsed})``.

    :param died: as for :func:`soak`.
    :param params: ``{soak_requests, soak_concurrency, soak_tokens, min_distinct, generation_timeout}``; seconds.
    """
    begin = time.monotonic()
    requests, tokens, limit = params["soak_requests"], params["soak_tokens"], params["generation_timeout"]
    answered, problem = soak(client, died, requests, params["soak_concurrency"], tokens, limit)
    problem = problem or still_healthy(client, max(tokens, 2), params["min_distinct"], limit)
    found = []
    if problem:
        message = f"The server answered {answered} of {requests} small requests and is not well after that."
        found = [finding(RUNG, "soak", "error", message, problem, "read its log; the stacks of its workers say more")]
    return found, {"requests": requests, "answered": answered, "elapsed": round(time.monotonic() - begin, 3)}
