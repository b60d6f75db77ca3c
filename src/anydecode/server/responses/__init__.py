"""The endpoints under `/v1/responses`: requests are translated to those of a conversation."""
