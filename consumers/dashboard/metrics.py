"""The run for Prometheus: its numbers, and where its processes serve theirs."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from consumers.dashboard.look import look_of
from pipeline.telemetry import run_metrics
from pipeline.telemetry.families import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Run-level numbers of the newest look."""
    return Response(run_metrics.run_page(look_of(request).newest), media_type=CONTENT_TYPE)


@router.get("/metrics/targets")
async def targets(request: Request) -> Response:
    """Prometheus' HTTP service discovery."""
    return JSONResponse(run_metrics.targets(look_of(request).newest))
