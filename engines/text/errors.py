"""What goes wrong with text, in the caller's terms.

TextError
├── TokenizerError     the model's vocabulary is broken or of a kind that is not supported
└── TemplateError      the chat template refuses these messages, or cannot be rendered within its limits
"""

from __future__ import annotations


class TextError(Exception):
    """Root of what this room raises."""


class TokenizerError(TextError):
    """No tokenizer can be made from these files."""


class TemplateError(TextError):
    """These messages cannot be rendered; says why."""
