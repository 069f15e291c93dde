"""Completion of words with colons in bash, which breaks `file.py:factory` into three words."""

from __future__ import annotations

import os

from click.shell_completion import BashComplete, CompletionItem, split_arg_string


class ColonComplete(BashComplete):
    """Puts a word that bash broke at its colons together again, and completes what stands behind the last of them."""

    _replaced = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Returns the words before the one that is completed, and that one."""
        broken, cursor = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        broken = broken[: cursor + 1] + [""] * (cursor + 1 - len(broken))
        words: list[str] = []
        for at, word in enumerate(broken):
            is_joined = at > 0 and bool(words) and (word == ":" or broken[at - 1] == ":")
            words[-1:] = [words[-1] + word] if is_joined else [*words[-1:], word]
        # bash replaces what stands behind the colon alone, where it broke the word there
        if ":" in broken[-2:]:
            self._replaced = words[-1][: words[-1].rindex(":") + 1]
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """Returns the line of an item, without what bash keeps."""
        return f"{item.type},{str(item.value).removeprefix(self._replaced)}"
