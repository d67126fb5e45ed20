"""What tests ask about a trace."""


def is_tracer_note(note: str) -> bool:
    """Whether a note says what a trace keeps."""
    return note.startswith("the trace keeps what it found for the example")
