"""A real server on loopback, for fakes of services to stand on."""

from aiohttp import web


class LoopbackServer:
    """Gives every request to :meth:`handle`; ``url`` and ``port`` are known once it is entered."""

    client_max_size = 50_000_000
    handler_cancellation = False

    async def __aenter__(self):
        app = web.Application(client_max_size=self.client_max_size)
        app.router.add_route("*", "/{path:.*}", self.handle)
        options = {"shutdown_timeout": 0.1, "handler_cancellation": self.handler_cancellation}
        self._runner = web.AppRunner(app, **options)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def handle(self, request):
        """The answer to one request."""
        raise NotImplementedError
