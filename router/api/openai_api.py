"""`/v1/...`: OpenAI's API, for its clients."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from router.api.answering import Desk
from router.api.openai_answers import ChatCompletion, ChatCompletionChunk, Completion, ModelCard, ModelList
from router.api.openai_bodies import ChatBody, CompletionBody
from router.api.openai_requests import read_chat, read_completion, unknown_model
from router.api.openai_shapes import ChatShape, CompletionShape
from router.http.body import JsonRoute
from router.http.responses import event_stream
from router.request.queue_limit import PlacesOfRequest
from shared.errors import RequestError


def openai_routes(desk: Desk, context_length: Callable[[], int]) -> APIRouter:
    """The routes. Those that generate are behind a QueueGate. `context_length` returns the fleet's."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/completions", response_model=Completion, responses=event_stream(Completion))
    async def completions(request: Request, body: CompletionBody, places: PlacesOfRequest) -> Response:
        """Complete one prompt or several."""
        return await desk.respond(
            request, places, lambda intake: read_completion(body, intake), CompletionShape
        )

    @router.post(
        "/chat/completions", response_model=ChatCompletion, responses=event_stream(ChatCompletionChunk)
    )
    async def chat_completions(request: Request, body: ChatBody, places: PlacesOfRequest) -> Response:
        """Answer a conversation."""
        return await desk.respond(request, places, lambda intake: read_chat(body, intake), ChatShape)

    @router.post("/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        """A 404 with a sentence."""
        raise RequestError("this server generates text: it has no embeddings", status=404)

    def model_card() -> ModelCard:
        model = desk.slot.get()
        return ModelCard(id=model.name, root=model.model, max_model_len=context_length())

    @router.get("/models")
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[model_card()])

    @router.get("/models/{model_id:path}")
    async def model_by_id(model_id: str) -> ModelCard:
        """The model, by its name."""
        if model_id != desk.slot.get().name:
            raise unknown_model(model_id, desk.slot.get())
        return model_card()

    return router
