"""One module per group of paths; what they share is `app.service.Service`."""

from fastapi import Request

from app.service import Service


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
