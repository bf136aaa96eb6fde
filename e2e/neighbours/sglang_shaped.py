"""A server in SGLang's shape before one of our engines: `python -m e2e.neighbours.sglang_shaped PORT ENGINE_URL`.

SGLang itself needs CUDA. Names and labels of the metrics are those of its package 0.5.23; KV events in vLLM's form, which SGLang
has too, come from the engine itself.
"""

import sys
from typing import Final

import aiohttp
from aiohttp import web

_ENGINE: Final = web.AppKey("engine", aiohttp.ClientSession)
_GAUGES: Final = {
    "sglang:num_running_reqs": "vllm:num_requests_running",
    "sglang:num_queue_reqs": "vllm:num_requests_waiting",
    "sglang:token_usage": "vllm:kv_cache_usage_perc",
}
_LABELS: Final = '{engine_type="unified",model_name="tiny",pp_rank="0",tp_rank="0"}'


async def metrics(request: web.Request) -> web.Response:
    """The engine's figures by SGLang's names."""
    async with request.app[_ENGINE].get("/metrics") as answer:
        page = (await answer.text()).splitlines()
    figures = {line.partition("{")[0]: line.rpartition(" ")[2] for line in page if not line.startswith("#")}
    lines = [f"{name}{_LABELS} {figures[its]}" for name, its in _GAUGES.items()]
    lines += [f"sglang:page_size{_LABELS} 16.0", f"sglang:num_pages{_LABELS} 1000.0"]
    return web.Response(text="\n".join(lines) + "\n")


async def names(request: web.Request) -> web.Response:
    """As SGLang lists them."""
    async with request.app[_ENGINE].get("/v1/models") as answer:
        found = await answer.json()
    known = [{"id": it["id"], "object": "model", "created": 0, "owned_by": "sglang", "root": it["id"]} for it in found["data"]]
    return web.json_response({"object": "list", "data": known})


async def passed_on(request: web.Request) -> web.StreamResponse:
    """Everything else, as the engine answers it."""
    kept = {name: request.headers[name] for name in ("content-type",) if name in request.headers}
    body = await request.read()
    async with request.app[_ENGINE].request(request.method, request.path_qs, data=body or None, headers=kept) as answer:
        response = web.StreamResponse(status=answer.status, headers={"content-type": answer.headers["content-type"]})
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        return response


def main(port: int, engine: str) -> None:
    """Serve until the process ends."""

    async def connected(app: web.Application):
        async with aiohttp.ClientSession(engine) as session:
            app[_ENGINE] = session
            yield

    app = web.Application()
    app.cleanup_ctx.append(connected)
    hidden = [web.get(path, lambda _: web.Response(status=404)) for path in ("/prompt-bundle", "/load")]
    app.add_routes([web.get("/metrics", metrics), web.get("/v1/models", names), *hidden, web.route("*", "/{path:.*}", passed_on)])
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
