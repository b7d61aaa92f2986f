"""The Responses API: create, stream, continue, over HTTP and over a WebSocket."""
