from operators.user_code import clean, said


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_what_user_code_raises_can_always_be_written_down() -> None:
    assert said(ValueError("two\nlines")) == "ValueError: two lines"
    assert said(Unspeakable()) == "Unspeakable: its message cannot be read"
    said(OSError("bad \udcff name")).encode()
    assert clean("bad \udcff name") == "bad ? name"
