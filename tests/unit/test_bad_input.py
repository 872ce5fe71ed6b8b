"""Bad arguments, bad files and bad servers: exit status 2 and one clear line, never a traceback, never status 0."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import httpx
import pytest
from typer.testing import CliRunner

from det_plugin import test_deterministic as module
from det_plugin.cli import app
from det_plugin.errors import ConfigError
from det_plugin.evidence.certificates import CertificateStore
from det_plugin.evidence.records import Answer, RecordFile, RequestRecord, header_line, read_records
from det_plugin.host.vllm import doctor, store
from det_plugin.terminal import EXIT_INTERRUPTED, check_writable, guarded
from det_plugin.verify.bench_client import BenchClient
from det_plugin.verify.client import CompletionClient, ServerFailureError
from det_plugin.verify.options import VerifyOptions
from det_plugin.verify.replay import ask_all, compare_records, save
from det_plugin.verify.runner import run_verification


def invoke(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


def assert_one_line(result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert len(result.output.strip().splitlines()) == 1, result.output
    for part in parts:
        assert part in result.output


def recording(*answers: Answer, name: str = "1") -> RecordFile:
    return RecordFile(records=[RequestRecord(id=name, request={"prompt": "a"}, answers=list(answers))])


# --- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--port", "99999"], "ports 1 to 65535"),
        (["--port", "0"], "ports 1 to 65535"),
        (["--port", "-1"], "accepts http://host:port"),
        (["--host", ""], "--host"),
        (["--base-url", "http://localhost:99999"], "--base-url"),
        (["--base-url", "ftp://localhost"], "--base-url"),
        (["--api-key", "ключ"], "--api-key"),
        (["--api-key", "a\nb"], "--api-key"),
        (["--frequency-penalty", "nan"], "--frequency-penalty"),
        (["--presence-penalty", "inf"], "--presence-penalty"),
        (["--top-p", "0"], "--top-p"),
        (["--top-p", "nan"], "--top-p"),
        (["--top-k", "-5"], "--top-k"),
        (["--min-p", "2"], "--min-p"),
        (["--n-trials", "9" * 20], "--n-trials"),
        (["--n-start", "9" * 20], "--n-start"),
        (["--batch-sizes", "9" * 20], "--batch-sizes"),
        (["--prefix-lengths", "9" * 20], "--prefix-lengths"),
        (["--max-new-tokens", "9" * 20], "--max-new-tokens"),
    ],
)
def test_verify_refuses_before_it_connects(args, part):
    assert_one_line(invoke("verify", "--port", 1, *args), part)


@pytest.mark.parametrize("args", [["--port", "99999"], ["--frequency-penalty", "nan"], ["--json", "."]])
def test_the_module_of_sglang_users_refuses_as_well(args, capsys):
    assert module.main(["--port", "1", *args]) == 2
    captured = capsys.readouterr()
    assert len((captured.out + captured.err).strip().splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--temperature", "nan"],
        ["--temperature", "-2"],
        ["--sampling-seed", "-1"],
        ["--sampling-seed", "9" * 20],
        ["--timeout", "nan"],
        ["--timeout", "0"],
        ["--port", "99999"],
    ],
)
def test_record_accepts_what_verify_accepts(tmp_path, args):
    (tmp_path / "p.txt").write_text("hello\n")
    result = invoke("record", "--prompts", tmp_path / "p.txt", "-o", tmp_path / "r", "--port", 1, *args)
    assert_one_line(result, args[0] if args[0] != "--port" else "--base-url")


def test_record_needs_a_token_to_generate(tmp_path):
    assert invoke("record", "--prompts", "p", "-o", tmp_path / "r", "--max-tokens", "0").exit_code == 2


def test_bench_refuses_a_name_given_twice_and_a_bad_file(tmp_path):
    twice = invoke("bench", "--suite", "cpu", "--servers", "a=http://localhost:1,a=http://localhost:2")
    assert_one_line(twice, "twice")
    (tmp_path / "file").write_text("")
    servers = ["--suite", "cpu", "--no-check", "--servers", "stock=http://localhost:1"]
    assert_one_line(invoke("bench", *servers, "--out", tmp_path / "file" / "x.json"), "--out")
    assert_one_line(invoke("bench", *servers, "--out", tmp_path), "--out")
    os.mkfifo(tmp_path / "pipe")
    assert_one_line(invoke("bench", *servers, "--out", tmp_path / "pipe"), "no regular file")


def test_bench_of_a_folder_that_is_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for missing in (tmp_path / "missing", tmp_path / "empty", tmp_path / "file", "", "./missing", "../m/model", "~/m"):
        result = invoke("bench", "--suite", "cpu", "--model", missing, "--host-only", "stock")
        assert_one_line(result, f"--model: got '{missing}'")


def test_bench_that_fails_leaves_no_folder(tmp_path):
    servers = ["--suite", "cpu", "--no-check", "--servers", "stock=http://localhost:1", "--timeout", "5"]
    assert invoke("bench", *servers, "--out", tmp_path / "a" / "b" / "x.json").exit_code == 2
    assert not (tmp_path / "a").exists()


def test_demo_whose_report_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_line(invoke("demo", "--report", tmp_path / "file"), "file")


def test_certify_of_a_model_that_the_host_cannot_load(monkeypatch):
    def fail(model):
        raise ValueError("no such\nmodel")

    monkeypatch.setattr(doctor, "certify_main", fail)
    assert_one_line(invoke("certify", "/nope"), "/nope could not be certified: no such model")
    assert_one_line(invoke("certify", ""), "MODEL")


def test_doctor_names_the_certificates_of_other_fingerprints(tmp_path, monkeypatch, capsys):
    root = tmp_path / "b[/x] :x: [red]c"
    for name in ("linear/a.json", "linear/b.json", "tuning/gpu.json"):
        (root / "worker" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "worker" / name).write_text("{}")
    monkeypatch.setattr(store, "certificate_store", lambda _: CertificateStore("digest", root))
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert f"certificates in {root}/digest" in text
    assert "none under this process's own fingerprint" in text
    assert "worker: 2 certificates" in text


@pytest.mark.parametrize("below", ["", "certificates"])
def test_doctor_of_a_certificate_folder_that_is_a_file(below, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    root = {"bad": tmp_path / "file" / below, "good": tmp_path / "new" / below}
    for name, status in (("bad", 2), ("good", 0)):
        monkeypatch.setattr(store, "certificate_store", lambda _, name=name: CertificateStore("digest", root[name]))
        assert doctor.main([]) == status
        captured = capsys.readouterr()
        assert bool(captured.out) == (status == 0)
        assert len(captured.err.splitlines()) == bool(status)
        assert (f"{tmp_path / 'file'} is not a folder" in captured.err) == bool(status)
    assert not (tmp_path / "new").exists()


def test_doctor_of_a_certificate_folder_without_permission(tmp_path, monkeypatch):
    CertificateStore("digest", tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="no permission to read"):
        CertificateStore("digest", tmp_path)


# --- output -----------------------------------------------------------------------------------------------


def test_output_files_are_checked_before_anything_is_sent(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "p.txt").write_text("hello\n")
    save(tmp_path / "r", recording(Answer(token_ids=[1], logprobs=[-1.0])))
    for bad in ("", tmp_path, tmp_path / "file" / "x"):
        for args in (
            ["verify", "--json", bad],
            ["verify", "--html", bad],
            ["record", "--prompts", tmp_path / "p.txt", "-o", bad],
            ["replay", tmp_path / "r", "-o", bad],
            ["replay", tmp_path / "r", "--json", bad],
        ):
            result = invoke(*args, "--port", 1)
            assert_one_line(result)
            assert "cannot reach" not in result.output
        assert_one_line(invoke("diff", tmp_path / "r", tmp_path / "r", "--json", bad), "--json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "p.txt", "r"]


def test_a_folder_without_write_permission(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="no permission"):
        check_writable("--json", tmp_path / "x")


def test_records_go_into_a_pipe_and_through_a_link(tmp_path):
    found = recording(Answer(token_ids=[1], logprobs=[-1.0]))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save(pipe, found)
    assert pipe.is_fifo()
    assert os.read(reader, 1 << 16).count(b"\n") == 2
    os.close(reader)
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    save(tmp_path / "link", found)
    assert (tmp_path / "link").is_symlink()
    assert read_records(tmp_path / "target").records == found.records


def test_a_failed_write_leaves_no_part_behind(tmp_path):
    (tmp_path / "r").write_text("old")
    broken = RecordFile(records=[RequestRecord(id="1", request={"x": object()}, answers=[])])
    with pytest.raises(TypeError):
        save(tmp_path / "r", broken)
    assert [p.name for p in tmp_path.iterdir()] == ["r"]
    assert (tmp_path / "r").read_text() == "old"


@pytest.mark.parametrize(
    ("error", "status"), [(OSError("x"), 2), (ConfigError("x"), 2), (KeyboardInterrupt(), EXIT_INTERRUPTED)]
)
def test_guarded_statuses(error, status, capsys):
    def action():
        raise error

    assert guarded(action) == status
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_output_that_nobody_reads_or_that_cannot_be_encoded(tmp_path):
    save(tmp_path / "r", recording(Answer(token_ids=[1], logprobs=[-1.0])))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "det_plugin.cli"]
    done = subprocess.run(
        [*command, "diff", tmp_path / "r", tmp_path / "r"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    done = subprocess.run(
        [*command, "verify", "--base-url", "http://ü.invalid"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# --- files ------------------------------------------------------------------------------------------------

HEADER = header_line({}, "")
GOOD = '{"kind":"request","id":"1","request":{},"answers":[{"token_ids":[1],"logprobs":["-0x1p0"]}]}'


@pytest.mark.parametrize(
    "text",
    [
        HEADER + "\n" + "[" * 200_000,
        HEADER.replace('"fingerprint": {}', '"fingerprint": [1]') + "\n" + GOOD,
        HEADER.replace('"fingerprint": {}', '"fingerprint": null') + "\n" + GOOD,
        HEADER + "\n" + GOOD.replace("-0x1p0", "0x1p+99999"),
        HEADER + "\n" + GOOD.replace('"-0x1p0"', '"-0x1p0","-0x1p0"'),
        HEADER + "\n" + GOOD.replace('"id":"1"', '"id":null'),
        "\n\n",
    ],
)
def test_record_files_that_are_none(tmp_path, text):
    (tmp_path / "r").write_text(text)
    assert_one_line(invoke("diff", tmp_path / "r", tmp_path / "r"), "record file")


@pytest.mark.parametrize(
    "line",
    ['{"prompt":NaN}', '{"prompt":"a","top_p":Infinity}', '{"prompt":"\\ud800"}', '{"prompt":' + "[" * 200_000],
)
def test_prompt_files_that_cannot_be_sent(tmp_path, line):
    (tmp_path / "p").write_text(line + "\n")
    assert_one_line(invoke("record", "--prompts", tmp_path / "p", "-o", tmp_path / "r", "--port", 1), "line 1")


def test_prompt_file_that_asks_for_a_stream(tmp_path):
    (tmp_path / "p").write_text('{"prompt":"a","stream":true}\n')
    assert_one_line(invoke("record", "--prompts", tmp_path / "p", "-o", tmp_path / "r"), "asks for a stream")


@pytest.mark.parametrize("answers", [(), (Answer(token_ids=[], logprobs=[]),)])
def test_nothing_compared_is_not_the_same(answers):
    assert compare_records(recording(*answers), recording(*answers)).status == "not_tested"


def test_top_logprobs_that_neither_has_are_not_the_same():
    one = recording(Answer(token_ids=[1], logprobs=[-1.0]))
    assert compare_records(one, one).status == "same"
    result = compare_records(one, one, top=True)
    assert result.status == "not_tested"
    assert "nothing in the answers to compare" in "\n".join(result.lines())


# --- servers ----------------------------------------------------------------------------------------------

MODELS = {"data": [{"id": "m", "max_model_len": 64}]}


def answer(**changes):
    choice = {"prompt_token_ids": [1], "token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, **changes}
    return json.dumps({"choices": [choice]}).encode()


def ask(handler, **kw):
    transport = httpx.MockTransport(handler)
    return ask_all([("1", {"prompt": "a"})], base_url="http://fake", transport=transport, **kw)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        answer(token_ids=[10**25]),
        answer(token_ids=[-1]),
        answer(logprobs={"token_logprobs": [float("nan")]}),
        answer(logprobs={"token_logprobs": [float("-inf")]}),
        answer(logprobs={"token_logprobs": [10**400]}),
        answer(logprobs={"token_logprobs": [-1.0], "top_logprobs": [{}, {}]}),
        answer(prompt_token_ids=None),
        answer(text=5),
    ],
)
def test_answers_that_are_none(content):
    def handler(request):
        return httpx.Response(200, json=MODELS) if request.method == "GET" else httpx.Response(200, content=content)

    with pytest.raises(ServerFailureError) as caught:
        ask(handler)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_what_their_header_says():
    def handler(request):
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"abcde"))

    with pytest.raises(ServerFailureError):
        ask(handler)


def test_top_logprobs_that_a_server_does_not_send_are_not_tested():
    def handler(request):
        if request.method == "GET":
            return httpx.Response(200, json=MODELS)
        body = json.loads(request.content)
        given = body["prompt"] if isinstance(body["prompt"], list) else list(range(200))
        count = body["max_tokens"]
        logprobs = {"token_logprobs": [-1.0 / (i + 1) for i in range(count)]}
        content = answer(prompt_token_ids=given, token_ids=list(range(count)), logprobs=logprobs)
        return httpx.Response(200, content=content)

    for top, status in ((0, "same"), (2, "not_tested")):
        options = VerifyOptions(
            base_url="http://fake", test_modes=["single"], batch_sizes=[1, 2], max_new_tokens=12, top_logprobs=top
        )
        assert run_verification(options, transport=httpx.MockTransport(handler)).status == status


def test_an_error_message_cannot_steer_the_terminal():
    def handler(request):
        return httpx.Response(500, content=b'{"error":{"message":"bad \\u001b[31m\\n\\ud800"}}')

    with pytest.raises(ServerFailureError) as caught:
        ask(handler)
    assert str(caught.value).isprintable()


def test_a_server_that_sends_a_byte_now_and_then_is_given_up():
    async def drip():
        for _ in range(1000):
            yield b" "
            await asyncio.sleep(0.01)

    with pytest.raises(ServerFailureError, match="did not answer in time"):
        ask(lambda request: httpx.Response(200, content=drip()), timeout=0.1)


@contextmanager
def dripping(piece: bytes, *, pause: float = 0.02):
    """A server that answers everything with a stream of ``piece`` without an end; yields its address."""
    stop = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            with suppress(OSError):
                while not stop.wait(pause):
                    self.wfile.write(piece)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


EVENT = b"data: " + answer() + b"\n\n"


@pytest.mark.parametrize("piece", [b": keep-alive\n\n", EVENT, b"x"], ids=["comments", "tokens", "no line"])
@pytest.mark.parametrize("ask_for", ["complete", "timed"])
def test_a_stream_without_an_end_is_given_up(piece, ask_for):
    """Each piece comes well within the time limit, so that only the whole request's time can end it."""

    async def run(url):
        client_class = BenchClient if ask_for == "timed" else CompletionClient
        async with client_class(url, model="m", timeout=0.5) as client:
            if ask_for == "timed":
                await client.timed(b"{}", tokens=1)
            else:
                await client.complete([1], max_tokens=1, stream=True)

    with dripping(piece) as url:
        began = time.monotonic()
        with pytest.raises(ServerFailureError, match="did not answer in time") as caught:
            asyncio.run(run(url))
        assert 0.4 < time.monotonic() - began < 5
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("event", [b"{bad", b"5", b"null", b"[1]", b"[" * 200_000])
def test_events_that_are_none(event):
    async def run():
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"data: " + event + b"\n\n"))
        async with BenchClient("http://fake", transport=transport) as client:
            await client.timed(b"{}", tokens=1)

    with pytest.raises(ServerFailureError):
        asyncio.run(run())
