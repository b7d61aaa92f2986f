"""HTTP over aiohttp, in OpenAI's shapes, and the terminal chat that speaks to it."""
