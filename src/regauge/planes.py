"""The three planes of a host: what runs is bound to them, and what does not fit is refused before it starts."""
