"""The site that all pages belong to: their frame, their rights, their forms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl, quote

from aiohttp import web
from multidict import MultiDict

from pinlaterd import __version__
from pinlaterd.access import Access, may, may_with_all_queues
from pinlaterd.clock import Clock
from pinlaterd.config.schema import Config, UserSettings
from pinlaterd.http_port import body_of
from pinlaterd.router_client import RouterClient
from pinlaterd.web.live import EVENT_STREAM, LiveStreams, ServiceFrames
from pinlaterd.web.refusals import PageProblem, check_form, problem_of, refusal
from pinlaterd.web.rendering import Rendering
from pinlaterd.web.sessions import Sessions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

USER = web.RequestKey("web_user", UserSettings)  # who makes the request, where there are users
FORM = web.RequestKey("web_form", MultiDict)  # of a request that acts

# In the order of the header; those that have no page are left out.
_NAV = (
    *(("Overview", "/"), ("Failures", "/failures"), ("Workers", "/workers")),
    *(("System", "/system"), ("Audit", "/audit")),
)
ALL_QUEUES = "*"
THEMES = ("system", "light", "dark")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_POLICY = "Content-Security-Policy"


class Site:
    """The parts that pages share."""

    def __init__(self, etc: Path, config: Config, clock: Clock) -> None:
        self.etc = etc
        self.config = config  # the active one; the process replaces it
        self.clock = clock
        self.client = RouterClient(config.server, clock, "web")
        # A login is checked each time, within the limit of its address.
        self.access = Access(config.users, clock, most_remembered=0)
        self.sessions = Sessions(clock, f"pinlaterd_{config.server.web_port}")
        self.frames = ServiceFrames(clock)
        self.live = LiveStreams(self.frames, clock, self._current_user)
        self.commands: list[web.RouteDef] = []  # calls of pinlater-admin, by the modules of pages
        self._rendering = Rendering()
        self._paths: set[str] = set()

    def follow(self, config: Config) -> None:
        """Follow a configuration that is active from now on."""
        self.config = config
        self.access.follow(config.users)

    async def close(self) -> None:
        """End the streams and the connections; keep the sessions for the next process."""
        self.sessions.save()
        await self.live.close()
        await self.client.close()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of what is no page."""
        return [
            web.get("/static/{name}", self._rendering.serve_file),
            self.page("/live", self._follow, role=""),
        ]

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        """Send live figures; or, once a session is over, that somebody has to log in again: a
        stream can't follow a redirect to the login."""
        if self.config.users and request.get(USER) is None:
            return web.Response(text="event: login\ndata: 0\n\n", content_type=EVENT_STREAM)
        self.check_right(request, "view", "")
        return await self.live.serve(request)

    # --- rights ------------------------------------------------------------------------------

    def page(self, path: str, handler: Handler, *, role: str = "view") -> web.RouteDef:
        """Return the route of a page. `role`: that its user needs; "": none."""
        self._paths.add(path)

        async def show(request: web.Request) -> web.StreamResponse:
            self._admit(request, role)
            return await handler(request)

        return web.get(path, show)

    def action(
        self, path: str, handler: Handler, *, role: str = "operate", writes: bool = True
    ) -> web.RouteDef:
        """Return the route of a form, which the handler finds in `request[FORM]`. `writes`: whether
        it changes the service."""

        async def act(request: web.Request) -> web.StreamResponse:
            form = await read_form(request)
            check_form(request, form, self.sessions.token(request))
            self._admit(request, role)
            if writes:
                self.check_writes(request)
            request[FORM] = form
            return await handler(request)

        return web.post(path, act)

    def _admit(self, request: web.Request, role: str) -> None:
        """Check that the user may do what `role` is for. Raises PageProblem, or sends to the
        login."""
        user = self._current_user(request)
        if user is not None:
            request[USER] = user
        if not role:
            return
        if self.config.users and user is None:
            if request.method != "GET":
                raise refusal(request, "nobody is logged in", "Log in, and repeat what you did.")
            raise web.HTTPSeeOther(f"/login?next={quote(request.path_qs, safe='')}")
        self.check_right(request, role, request.match_info.get("queue", ""))

    def check_writes(self, request: web.Request) -> None:
        """Check that the service may be changed from here. Raises PageProblem."""
        if not self.config.server.web_writes:
            cure = "Set `web_writes: true` in etc/pinlaterd.yaml."
            raise refusal(request, "this dashboard only shows", cure)

    def check_right(self, request: web.Request, role: str, queue: str) -> None:
        """Check that the user of a request has `role` for `queue`. Raises PageProblem."""
        if not may(request.get(USER), role, queue):
            raise self._no_role(request, role, f" for queue {queue}" if queue else "")

    def check_right_to_all_queues(self, request: web.Request, role: str) -> None:
        """Check that the user of a request has `role` for every queue. Raises PageProblem."""
        if not may_with_all_queues(request.get(USER), role):
            raise self._no_role(request, role, " for all queues")

    def _why_read_only(self, request: web.Request, queue: str) -> str:
        """Return what prevents the user of a request from changing `queue`, or anything where that
        is "", as a sentence's end; "": nothing."""
        if not self.config.server.web_writes:
            return "`web_writes: true` in etc/pinlaterd.yaml allows it"
        user = request.get(USER)
        if queue == ALL_QUEUES:
            is_allowed, of_queue = may_with_all_queues(user, "operate"), " for all queues"
        else:
            is_allowed, of_queue = may(user, "operate", queue), f" for {queue}" if queue else ""
        return "" if is_allowed else f"the role `operate`{of_queue} allows it"

    def _no_role(self, request: web.Request, role: str, of_queues: str) -> PageProblem:
        name = request[USER].name
        cure = f"An operator can give it: `pinlater-admin user add {name} --role {role}`."
        return refusal(request, f"you have no role {role}{of_queues}", cure, name)

    def hidden_from(self, user: UserSettings | None) -> str:
        """Return the pattern of what a user may not see of bodies and statuses; "": sees all."""
        return "" if user is None or may(user, "bodies") else self.config.server.web_redact

    def _current_user(self, request: web.Request) -> UserSettings | None:
        return self.sessions.user_of(request, self.config.users)

    # --- pages -------------------------------------------------------------------------------

    def render(
        self,
        request: web.Request,
        template: str,
        *,
        status: HTTPStatus = HTTPStatus.OK,
        queue: str = "",
        **values: object,
    ) -> web.Response:
        """Return a page of a template that extends base.html. `queue`: that the page is of, and may
        change; ALL_QUEUES: all."""
        user, config, now_ms = request.get(USER), self.config, self.clock.now_ms()
        theme, read_only = request.cookies.get("theme", ""), self._why_read_only(request, queue)
        frame: dict[str, object] = {
            "nav": [(title, path) for title, path in _NAV if path in self._paths],
            "path": request.path,
            "label": config.server.web_label,
            "queue": queue,
            "writes": not read_only,
            "read_only": read_only,
            "user": user.name if user is not None else "",
            "token": self.sessions.token(request),
            "theme": theme if theme in THEMES else "system",
            "themes": THEMES,
            "keys": "off" if request.cookies.get("keys") == "off" else "on",
            "version": __version__,
            "age": self.frames.age_seconds,
            "now_ms": now_ms,
            "as_of": now_ms - 1000 * (self.frames.age_seconds or 0.0),
            "here": request.path_qs,
            "away": self.frames.problem if self.frames.last is not None else "",
        }
        return self._rendering.page(request, template, {**frame, **values}, status)

    @web.middleware
    async def explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every error of a handler into a page that says what is wrong."""
        try:
            answer = await handler(request)
        except web.HTTPRedirection as redirection:
            self.sessions.keep_cookie(request, redirection)
            raise
        except Exception as error:  # noqa: BLE001 - the outermost place of a request
            problem = problem_of(request, error, request.get(USER))
            answer = self.render(request, "problem.html", status=problem.status, problem=problem)
        if not answer.prepared:
            self.sessions.keep_cookie(request, answer)
        return answer

    def allow_frame(self, answer: web.Response, origin: str) -> None:
        """Let a page show another site's in a frame."""
        answer.headers[_POLICY] = f"{_HEADERS[_POLICY]}; frame-src {origin}"

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add what every answer says to the browser."""
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)


async def read_form(request: web.Request) -> MultiDict[str]:
    """Return the fields of a form that was posted. Raises PageProblem."""
    try:
        body = (await body_of(request)).decode()
        return MultiDict(parse_qsl(body, keep_blank_values=True, errors="strict"))
    except ValueError:
        what, cure = "The form can't be read.", "Go back, and send it again."
        raise PageProblem(HTTPStatus.BAD_REQUEST, what, cure) from None


def own_path(path: str) -> str:
    """Return a path of this site to go to next: never one that leads to another site."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_own else "/"
