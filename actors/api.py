"""The HTTP ingress: LMDeploy's OpenAI, Anthropic and Responses routes over a routed engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from lmdeploy.serve.anthropic import create_anthropic_router
from lmdeploy.serve.core.generation_config import resolve_default_gen_config
from lmdeploy.serve.openai.api_server import set_parsers, validation_exception_handler
from lmdeploy.serve.openai.endpoints import create_openai_router
from lmdeploy.serve.openai.responses import create_responses_router
from lmdeploy.serve.parsers import validate_parser_names
from ray import serve
from starlette.exceptions import HTTPException

from actors.admin import Admin
from actors.auth import ApiKeyMiddleware, RequireAdmin, open_admin_tokens, open_api_keys
from actors.config import AppConfig
from actors.dispatch import Dispatcher
from actors.engine_build import model_path
from actors.error_form import http_exception_response
from actors.limits import SizeLimits
from actors.middleware import RequestScopeMiddleware
from actors.policy import LOADING_RETRY_AFTER_S
from actors.request_body import check_continuation, name_session
from actors.request_checks import check_body
from actors.routed_engine import RoutedContext, RoutedEngine
from actors.ui import routes as ui

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

SERVED_PATHS = frozenset({'/v1/models', '/v1/chat/completions', '/v1/completions', '/v1/encode'})
"""Those of LMDeploy's own routes that make sense over several engines; the others manage the one in their process."""

OPEN_PATHS = ui.OPEN_PATHS | {'/health', '/ready'}
"""What needs no API key."""


class Api:
    """Serve deployment."""

    def __init__(self, config: AppConfig, router: DeploymentHandle, workers: DeploymentHandle) -> None:
        self._config = config
        self._router = router
        owner = serve.get_replica_context().replica_id.unique_id
        dispatcher = Dispatcher(router, workers, owner, config.router)
        self._api_keys = open_api_keys(config.api)
        self._admin_tokens = open_admin_tokens(config.api)
        self._admin = Admin(router, workers)
        self._context = RoutedContext()
        self._context.async_engine = RoutedEngine(config, dispatcher)
        self._context.default_gen_config = resolve_default_gen_config(
            config.api.generation_config, model_path(config.model), config.model.trust_remote_code
        )
        set_parsers(self._context, *validate_parser_names(config.api.reasoning_parser, config.api.tool_call_parser))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application that this replica serves."""
        app = FastAPI(title=self._config.model.name, docs_url='/docs')
        app.include_router(self._probes())
        app.include_router(self._admin.routes(), dependencies=[Depends(RequireAdmin(self._admin_tokens))])
        app.include_router(ui.ui_router(self._router.stats.remote))
        checks = [Depends(check_body), Depends(check_continuation), Depends(name_session)]
        openai = create_openai_router(self._context)
        openai.routes[:] = [route for route in openai.routes if getattr(route, 'path', None) in SERVED_PATHS]
        for router in (openai, create_anthropic_router(self._context), create_responses_router(self._context)):
            app.include_router(router, dependencies=checks)
        app.add_exception_handler(RequestValidationError, validation_exception_handler)
        app.add_exception_handler(HTTPException, http_exception_response)
        self._add_middleware(app)
        return app

    def _add_middleware(self, app: FastAPI) -> None:
        """Add what every request passes through, the innermost first."""
        options = self._config.api
        app.add_middleware(SizeLimits, max_body_bytes=options.max_body_bytes, max_header_bytes=options.max_header_bytes)
        if self._api_keys is not None:
            # Within CORS: a browser asks without a key whether it may send one.
            app.add_middleware(ApiKeyMiddleware, keys=self._api_keys, open_paths=OPEN_PATHS)
        if options.allow_origins:
            app.add_middleware(
                CORSMiddleware, allow_origins=options.allow_origins, allow_methods=['*'], allow_headers=['*']
            )
        app.add_middleware(RequestScopeMiddleware)

    def _probes(self) -> APIRouter:
        probes = APIRouter()

        @probes.get('/health')
        async def health() -> dict[str, str]:
            """Tell that this ingress is alive, whatever the model does."""
            return {'status': 'alive'}

        @probes.get('/ready')
        async def ready() -> JSONResponse:
            """Tell whether a worker can take requests."""
            reports = await self._router.workers.remote()
            states = {report.worker_id: report.state for report in reports}
            if 'ready' in states.values():
                return JSONResponse({'status': 'ready', 'workers': states})
            coming = (state for state in ('loading', 'reloading', 'sleeping') if state in states.values())
            status = next(coming, 'unavailable' if states else 'loading')
            reasons = ' '.join(report.message for report in reports)
            headers = {'retry-after': str(LOADING_RETRY_AFTER_S)}
            return JSONResponse(
                {'status': status, 'message': f'The model is {status}. {reasons}'.rstrip()}, 503, headers
            )

        return probes
