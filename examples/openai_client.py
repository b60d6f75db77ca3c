"""Talks to a running server with OpenAI's client.

anydecode serve --port 8000 &
python examples/openai_client.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str, prompt: str = "Once upon a time") -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id

    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=16, seed=7, temperature=0.8,
        extra_body={"decoder": "prompt-lookup"},
    )  # fmt: skip
    print(answer.choices[0].text)
    print(answer.anydecode["tokens_per_pass"], "tokens per pass")

    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=16, seed=7, temperature=0.8, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].text if chunk.choices else "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
