"""Questions are asked of a real HTTP server; right ones are counted, and each time is one line of the ledger."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from samples import RUN

KNOWN = {"capital of France": "It is Paris.", "12 * 12 =": "144 of course", "colour of snow": "white"}
QUESTIONS = [
    {"prompt": "capital of France", "contains": "paris"},
    {"prompt": "12 * 12 =", "text": "144"},
    {"prompt": "colour of snow", "contains": "black"},
    {"prompt": "unknown", "contains": "x"},
]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as SGLang's /generate does; a question that it does not know is an error."""

    def do_POST(self):  # noqa: N802
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = KNOWN.get(asked["text"])
        body = json.dumps({"text": said, "output_ids": [1], "meta_info": {"completion_tokens": 1}}).encode()
        self.send_response(200 if said else 500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments):
        """Say nothing."""


@pytest.fixture
def release(tmp_path):
    """Return the path of a release whose server answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    path = tmp_path / "releases" / "20260101T000000Z-fewchan-000000000000"
    path.mkdir(parents=True)
    launch = {"schema": 1, "endpoint": f"http://127.0.0.1:{server.server_port}", "served_model_name": "tiny"}
    (path / "launch.json").write_text(json.dumps(launch))
    yield path
    server.shutdown()
    thread.join()


def lines(release):
    """Return the events of the ledger."""
    ledger = release.parents[1] / "ledger.jsonl"
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def test_right_answers_are_counted_and_recorded(release, run_module):
    """Two of four are right: one is wrong, one is not answered. Nothing fails."""
    args = {"release": str(release), "questions": QUESTIONS, "repeats": 2, "run": RUN, "variant": "fewchan"}
    result = run_module("sglang_score", args)
    assert result["scores"] == [{"asked": 4, "right": 2, "answers": [True, True, False, False]}] * 2
    assert [item["prompt"] for item in result["wrong"]] == ["colour of snow", "unknown"]
    assert result["wrong"][0]["answer"] == "white" and "no answer" in result["wrong"][1]["answer"]
    one, two = lines(release)
    assert (one["event"], one["right"], one["release"], one["run"]) == ("score", 2, release.name, "r1")
    assert one["questions_digest"] == two["questions_digest"]
    run_module("sglang_score", dict(args, questions=QUESTIONS[:2], repeats=1))
    assert lines(release)[-1]["questions_digest"] != one["questions_digest"]


def test_nothing_is_asked_in_check_mode_or_of_nonsense(release, run_module):
    """The message names the input."""
    args = {"release": str(release), "questions": QUESTIONS, "run": RUN}
    assert run_module("sglang_score", args, check=True)["scores"] == []
    for change, word in (
        ({"questions": []}, "questions is empty"),
        ({"questions": [{"prompt": "what"}]}, "questions[0] ('what') expects nothing"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"run": {}}, "run needs the run"),
        ({"release": "/nowhere"}, "launch.json is missing"),
    ):
        result = run_module("sglang_score", {**args, **change})
        assert result["failed"] and word in result["msg"]
    assert lines(release) == []
