"""The endpoint of an SGLang server over ``requests``: health, models, server information, one generation.

``requests`` belongs to the engine, so modules that use this run with the engine's interpreter. Each call has one limit
in seconds for all of it, which ``requests`` alone does not give (its time-out starts anew with each received byte).
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import urllib.parse

from ansible.module_utils.common.respawn import has_respawned, respawn_module

try:
    import requests
except ImportError:
    requests = None


def need_requests(python=None):
    """Make sure that ``requests`` can be used; return why not, or an empty text.

    :param python: an interpreter that has it. The module starts itself again with it where the present one has not,
        and never comes back from here.
    """
    if requests is not None:
        return ""
    if python and os.access(python, os.X_OK) and not has_respawned():
        respawn_module(python)
    return f"The Python package requests is missing in {sys.executable}" + (
        f" and {python} cannot be used." if python else "; name the engine's interpreter in `python`."
    )


class ClientError(Exception):
    """A call that did not give what was asked.

    ``kind`` is ``refused`` (nothing listens), ``timeout``, ``unauthorised``, ``http`` (another status than 200, see
    ``status``) or ``invalid`` (an answer that is not of SGLang).
    """

    def __init__(self, kind, message, status=None):
        super().__init__(message)
        self.kind = kind
        self.status = status


class Call(threading.Thread):
    """One call in the background, so that whoever waits for it can watch the process meanwhile."""

    def __init__(self, function, *args, limit):
        super().__init__(daemon=True)
        self._function, self._args = function, args
        self.limit = limit
        self.begin = time.monotonic()
        self.result = None
        self.error = None
        self.start()

    def run(self):
        """Body of the thread."""
        try:
            self.result = self._function(*self._args)
        except Exception as problem:  # handed to the waiting thread by `finished`
            self.error = problem

    @property
    def elapsed(self):
        """Seconds since the call began."""
        return time.monotonic() - self.begin

    def finished(self):
        """Return whether the call is over; its limit counts as an end.

        :raises ClientError: it failed or passed its limit.
        """
        if self.is_alive():
            if self.elapsed < self.limit:
                return False
            raise ClientError("timeout", f"no answer within {self.limit:g} s")
        if self.error:
            raise self.error
        return True

    def wait(self):
        """Wait for the result and return it.

        :raises ClientError: it failed or passed its limit.
        """
        self.join(max(self.limit - self.elapsed, 0))
        if not self.finished():
            raise ClientError("timeout", f"no answer within {self.limit:g} s")
        return self.result


def base_url(endpoint):
    """Return an endpoint that a client can connect to: a wildcard address becomes the loopback of its family."""
    parts = urllib.parse.urlsplit(endpoint)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname, parts.hostname)
    host = f"[{host}]" if ":" in host else host
    netloc = host if parts.port is None else f"{host}:{parts.port}"
    return urllib.parse.urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))


def innermost(problem):
    """Return what a wrapped connection error is about, without the layers around it."""
    found = re.findall(r"\[Errno -?\d+\] [^'\")]+", str(problem))
    return found[-1] if found else str(problem)


class Client:
    """Calls to one server.

    :param endpoint: base URL; a host name may stand for IPv4 and IPv6 addresses, each is tried.
    :param api_key: key that the server asks for, or None.
    """

    def __init__(self, endpoint, api_key=None):
        self.url = base_url(endpoint)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def _ask(self, method, path, limit, body=None):
        try:
            # A session for each call: calls run in several threads.
            with requests.Session() as session:
                # A proxy of the environment never stands between a host and itself.
                session.trust_env = False
                answer = session.request(
                    method, self.url + path, json=body, headers=self._headers, timeout=limit, allow_redirects=False
                )
        except requests.exceptions.Timeout:
            raise ClientError("timeout", f"{path} gave no answer within {limit:g} s") from None
        except (requests.exceptions.RequestException, OSError) as problem:
            raise ClientError("refused", f"{path} cannot be reached: {innermost(problem)}") from None
        if answer.status_code in (401, 403):
            raise ClientError("unauthorised", f"{path} asks for an API key", answer.status_code)
        if answer.status_code != 200:
            text = answer.text.strip()[:300]
            raise ClientError(
                "http", f"{path} answered {answer.status_code}{': ' + text if text else ''}", answer.status_code
            )
        return answer

    def _json(self, method, path, limit, body=None):
        answer = self._ask(method, path, limit, body)
        try:
            return answer.json()
        except ValueError:
            raise ClientError("invalid", f"{path} answered something that is not JSON: {answer.text[:100]!r}") from None

    def health(self, limit):
        """Ask ``/health``; on a ready server this runs a generation of one token. Returns True."""
        self._ask("GET", "/health", limit)
        return True

    def models(self, limit):
        """Return the served model names."""
        data = self._json("GET", "/v1/models", limit)
        try:
            return [item["id"] for item in data["data"]]
        except (KeyError, TypeError):
            raise ClientError("invalid", "/v1/models answered no list of models") from None

    def server_info(self, limit):
        """Return what the server says of itself: every argument in force, and ``internal_states``."""
        return self._json("GET", "/server_info", limit)

    def metrics(self, limit):
        """Return ``{name: sum over its label sets}`` of the server's metrics; empty where they are switched off."""
        try:
            text = self._ask("GET", "/metrics", limit).text
        except ClientError as problem:
            if problem.status == 404:
                return {}
            raise
        sums = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("sglang:"):
                key = name.split("{")[0]
                sums[key] = sums.get(key, 0.0) + float(value)
        return sums

    def generate(self, prompt, max_tokens, limit, logprobs=False):
        """Generate at temperature 0.

        The end-of-text token is ignored and special tokens are shown, so that the number of tokens is the one asked
        for, and a model that only ever says "end" shows up as one repeated token.

        :param logprobs: ask for the log-probability of each token.
        :returns: ``{text, tokens, ids, logprobs, elapsed}``; ``tokens`` is their number, ``logprobs`` is empty where
            none were asked for or given, ``elapsed`` in seconds.
        """
        begin = time.monotonic()
        params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True, "skip_special_tokens": False}
        body = {"text": prompt, "sampling_params": params}
        data = self._json("POST", "/generate", limit, dict(body, return_logprob=True) if logprobs else body)
        try:
            ids = list(data.get("output_ids") or [])
            meta = data["meta_info"]
            # Each entry is the log-probability, the token's id and its text.
            given = [float(entry[0]) for entry in meta.get("output_token_logprobs") or []]
            return {
                "text": data["text"],
                "tokens": int(meta["completion_tokens"]),
                "ids": ids,
                "logprobs": given,
                "elapsed": round(time.monotonic() - begin, 3),
            }
        except (KeyError, TypeError, AttributeError):
            raise ClientError("invalid", f"/generate answered no generation: {str(data)[:100]}") from None
