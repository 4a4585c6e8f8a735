"""POST /v1/responses and /v1/conversations."""
