"""Our gateway and a real Envoy under it, in front of any engines."""

import json
from typing import Any

import httpx

from e2e.neighbours.engines import MODEL, NAME, Engine
from e2e.neighbours.programs import Programs, answers
from e2e.traffic import openai_client
from penstock.api import headers
from testing.ports import free_ports


class Gateway:
    """One in front of these engines.

    Args:
        programs: Starts it.
        engines: Its fleet.
        named: By a fleet file, which names the model and the ports of KV events; else by addresses alone.
        poll_s: Seconds between two looks at their metrics; 0: none.
    """

    def __init__(self, programs: Programs, engines: list[Engine], named: bool, poll_s: float = 0.5) -> None:
        port, grpc, self._http = free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        self.programs = programs
        self.name, envoy = f"gateway-{port}", f"envoy-{port}"
        flags = ["--grpc-port", grpc, "--http-port", self._http, "--listener-host", "127.0.0.1", "--listener-port", port]
        if named:
            file = programs.folder / f"fleet-{port}.json"
            file.write_text(json.dumps({"models": [NAME], "replicas": [_entry(engine) for engine in engines]}))
            flags += ["--discovery", f"file:{file}", "--tokenizer", f"{NAME}={MODEL}"]
        else:
            flags += [flag for engine in engines for flag in ("--endpoint", engine.endpoint)]
        programs.penstock(self.name, "gateway", *flags, "--name", "test", "--poll-period", poll_s)
        programs.penstock(envoy, "envoy", "--gateway", f"127.0.0.1:{grpc}", "--concurrency", 1, "--node-id", "test")
        programs.wait(self.name, lambda: answers(f"http://127.0.0.1:{self._http}/readyz"), 120)
        programs.wait(envoy, lambda: answers(f"{self.url}/v1/models"), 120)
        self.api = openai_client(self.url)

    def asked(self, path: str, **query: str) -> Any:
        """What its HTTP port answers, as JSON."""
        return httpx.get(f"http://127.0.0.1:{self._http}{path}", params=query, timeout=10).raise_for_status().json()

    def replicas(self) -> dict[str, Any]:
        """The replicas by name as it sees them."""
        return {it["name"]: it for pool in self.asked("/pools")["pools"] for it in pool["replicas"]}

    def ask(self, prompt: str, tokens: int = 4, **more: Any) -> tuple[str, Any]:
        """The endpoint that answered a completion, and the answer."""
        raw = self.api.completions.with_raw_response.create(
            model=NAME, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}, **more
        )
        return raw.headers[headers.REPLICA], raw.parse()

    def log(self) -> str:
        """What the gateway has said."""
        return self.programs.log(self.name)

    def decided(self) -> dict[str, Any]:
        """The last decision and why."""
        return self.asked("/debug/decisions", n="1")[0]


def _entry(engine: Engine) -> dict[str, Any]:
    known: dict[str, Any] = {"host": "127.0.0.1", "port": engine.port, "engine": engine.kind}
    return {**known, "events_port": engine.events_port, "replay_port": engine.replay_port} if engine.events_port else known
