"""The page that `GET /` serves: chat, monitor, about."""
