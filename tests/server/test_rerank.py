"""Embeddings, reranking and scores over HTTP, with encoders."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.checks import scripted_llm
from encoder_models import (
    declare_pooling,
    hf_encoder,
    save_encoder,
    save_published_jina_v3,
)
from server_client import Client, served

DOCUMENTS = ["cd", "ab ab", "zz q", "cd"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_encoder(hf_encoder("Bert"), tmp_path_factory.mktemp("embedder"))
    prompts = {"query": "q ", "document": "d ", "other": "o "}
    with LLM(declare_pooling(folder, "mean_tokens", prompts=prompts), threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = hf_encoder("Bert", "ForSequenceClassification", num_labels=1)
    with LLM(save_encoder(model, tmp_path_factory.mktemp("judge")), threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def embedding_client(embedder: LLM) -> Iterator[Client]:
    with served(embedder) as client:
        yield client


@pytest.fixture(scope="module")
def judge_client(judge: LLM) -> Iterator[Client]:
    with served(judge) as client:
        yield client


def answer(client: Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(client: Client, path: str, **body: Any) -> str:
    """The message of a 400, which is one line."""
    response = client.http.post(path, json=body)
    assert response.status_code == 400, response.text
    fields = response.json()
    message = fields["error"]["message"] if isinstance(fields["error"], dict) else fields["error"]
    assert message and "\n" not in message
    return str(message)


def test_embeddings_are_those_of_the_python_api(embedding_client: Client, embedder: LLM) -> None:
    found = answer(embedding_client, "/v1/embeddings", input=["ab c", "d"])
    expected = embedder.embed(["ab c", "d"])
    assert [entry["embedding"] for entry in found["data"]] == expected
    assert found["usage"] == {"prompt_tokens": 8, "total_tokens": 8}  # 3 + 1, and 2 specials each
    packed = answer(embedding_client, "/v1/embeddings", input="d", encoding_format="base64")
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert np.array_equal(vector, np.array(expected[1], np.float32))
    other = answer(embedding_client, "/v1/embeddings", input="d", prompt_name="other")
    assert other["data"][0]["embedding"] == embedder.embed("o d")
    assert "query" in refusal(embedding_client, "/v1/embeddings", input="d", prompt_name="none")


def test_embeddings_of_a_task(tmp_path: Path) -> None:
    save_published_jina_v3(hf_encoder("JinaEmbeddingsV3", type_vocab_size=1), tmp_path)
    with LLM(tmp_path, threads=1) as llm, served(llm) as client:
        for options in ({}, {"task": "separation"}, {"task": "separation", "prompt_name": "other"}):
            [entry] = answer(client, "/v1/embeddings", input="ab", **options)["data"]
            assert entry["embedding"] == llm.embed("ab", **options)
        assert llm.embed("a b ab") != llm.embed("ab", task="separation") != llm.embed("ab")
        assert "text-matching" in refusal(client, "/v1/embeddings", input="ab", task="none")


def test_long_texts_are_refused_or_cut_on_request(embedding_client: Client, embedder: LLM) -> None:
    text = "a " * 100
    assert "64 tokens" in refusal(embedding_client, "/v1/embeddings", input=text)
    assert "64 tokens" in refusal(embedding_client, "/api/embed", input=text)
    kept = "a " * 62  # and the two special tokens, the last of which is kept
    for body in ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 64}):
        found = answer(embedding_client, "/v1/embeddings", input=text, **body)
        assert found["data"][0]["embedding"] == embedder.embed(kept)
        assert found["usage"]["prompt_tokens"] == 64
    ollama = answer(embedding_client, "/api/embed", input=text, truncate=True)
    assert ollama["embeddings"] == [embedder.embed(kept)]
    tokens = answer(embedding_client, "/v1/embeddings", input=[5] * 70, truncate_prompt_tokens=3)
    assert tokens["data"][0]["embedding"] == embedder.embed([5] * 3)
    for number in (0, 65):
        assert "truncate_prompt_tokens" in refusal(
            embedding_client, "/v1/embeddings", input="a", truncate_prompt_tokens=number
        )


def test_dimensions_only_if_the_repository_says_so(
    embedding_client: Client, tmp_path: Path
) -> None:
    assert "dimensions" in refusal(embedding_client, "/v1/embeddings", input="a", dimensions=8)
    model = hf_encoder("Bert")
    declare_pooling(save_encoder(model, tmp_path, matryoshka_dimensions=[8, 16]), "mean_tokens")
    with LLM(tmp_path, threads=1) as llm, served(llm) as client:
        whole = np.array(llm.embed("abc"))
        found = answer(client, "/v1/embeddings", input="abc", dimensions=8)
        cut = whole[:8] / np.linalg.norm(whole[:8])
        assert np.allclose(found["data"][0]["embedding"], cut, atol=1e-12)
        assert "8, 16, 48" in refusal(client, "/v1/embeddings", input="abc", dimensions=9)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_a_cross_encoder(
    judge_client: Client, judge: LLM, path: str
) -> None:
    scores = judge.relevance("ab", DOCUMENTS)
    assert scores[0] == scores[3] and len(set(scores)) == 3
    order = sorted(range(4), key=lambda index: -scores[index])
    found = answer(judge_client, path, query="ab", documents=DOCUMENTS)
    expected = [
        {"index": i, "relevance_score": scores[i], "document": {"text": DOCUMENTS[i]}}
        for i in order
    ]
    assert found["results"] == expected
    assert found["usage"]["prompt_tokens"] == 4 * (2 + 3) + 2 + 4 + 3 + 2
    objects = [{"text": text} for text in DOCUMENTS]
    few = answer(judge_client, path, query="ab", documents=objects, top_n=2, return_documents=False)
    assert few["results"] == [
        {"index": i, "relevance_score": scores[i]} for i in order[:2]
    ]  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"top_n": 4}], ids=["Continue", "Open WebUI"])
def test_programs_order_the_scores_by_index(
    judge_client: Client, judge: LLM, fields: dict[str, Any]
) -> None:
    """As Continue's provider `vllm` and Open WebUI's external reranker do."""
    body = {"model": "scripted", "query": "ab", "documents": DOCUMENTS, **fields}
    results = answer(judge_client, "/v1/rerank", **body)["results"]
    ordered = sorted(results, key=lambda result: result["index"])
    assert [result["relevance_score"] for result in ordered] == judge.relevance("ab", DOCUMENTS)


def test_documents_are_ranked_by_embeddings_with_their_prompts(
    embedding_client: Client, embedder: LLM
) -> None:
    query = np.array(embedder.embed("q ab"))
    expected = [float(query @ np.array(embedder.embed(f"d {text}"))) for text in DOCUMENTS]
    assert np.allclose(embedder.relevance("ab", DOCUMENTS), expected, atol=1e-12)
    found = answer(embedding_client, "/v1/rerank", query="ab", documents=DOCUMENTS)
    scores = {entry["index"]: entry["relevance_score"] for entry in found["results"]}
    assert np.allclose([scores[index] for index in range(4)], expected, atol=1e-12)
    assert [one.index for one in embedder.rerank("ab", DOCUMENTS, top_n=3)] == [
        entry["index"] for entry in found["results"][:3]
    ]


def test_scores_of_one_and_of_many_texts(
    judge_client: Client, judge: LLM, embedding_client: Client, embedder: LLM
) -> None:
    many = answer(judge_client, "/v1/score", text_1="ab", text_2=["cd", "zz q"])
    assert [entry["score"] for entry in many["data"]] == judge.relevance("ab", ["cd", "zz q"])
    pairs = answer(judge_client, "/score", text_1=["ab", "e"], text_2=["cd", "zz q"])
    expected = [judge.relevance("ab", ["cd"])[0], judge.relevance("e", ["zz q"])[0]]
    assert [entry["score"] for entry in pairs["data"]] == expected
    assert [entry["object"] for entry in pairs["data"]] == ["score", "score"]
    cosine = answer(embedding_client, "/v1/score", text_1="ab", text_2="cd")
    first, second = np.array(embedder.embed("ab")), np.array(embedder.embed("cd"))
    assert cosine["data"][0]["score"] == pytest.approx(float(first @ second), abs=1e-12)
    assert cosine["usage"]["prompt_tokens"] == 8
    for first_texts, second_texts in ((["a", "b"], ["c"]), ([], ["a"]), ("a", [])):
        assert "text_1" in refusal(
            judge_client, "/v1/score", text_1=first_texts, text_2=second_texts
        )


def test_pairs_are_cut_at_the_end_of_the_document(judge_client: Client, judge: LLM) -> None:
    long = "c " * 100
    assert "64 tokens" in refusal(judge_client, "/v1/rerank", query="ab", documents=[long])
    found = answer(
        judge_client, "/v1/rerank", query="ab", documents=[long], truncate_prompt_tokens=20
    )
    assert found["usage"]["prompt_tokens"] == 20
    [score] = judge.relevance("ab", ["c " * 15])  # and two tokens, and three special ones
    assert found["results"][0]["relevance_score"] == score
    message = refusal(
        judge_client, "/v1/rerank", query="a " * 30, documents=["b"], truncate_prompt_tokens=20
    )
    assert "33 tokens" in message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"prompt": "a"}),
    ],
)
def test_an_encoder_refuses_to_generate(
    embedding_client: Client, path: str, body: dict[str, Any]
) -> None:
    assert "is an encoder, which cannot generate text" in refusal(embedding_client, path, **body)


def test_a_chat_model_does_not_rank() -> None:
    with scripted_llm() as llm, served(llm) as client:
        for path, body in (
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ):
            assert "neither an embedding model" in refusal(client, path, **body)


def test_bodies_that_are_refused(judge_client: Client) -> None:
    assert "documents" in refusal(judge_client, "/v1/rerank", query="a", documents=[])
    assert "instruction" in refusal(
        judge_client, "/v1/rerank", query="a", documents=["b"], instruction="c"
    )
    assert "query" in refusal(judge_client, "/v1/rerank", query=3, documents=["b"])
    many = ["a"] * 2049
    assert "2049" in refusal(judge_client, "/v1/rerank", query="a", documents=many)
    assert "2049" in refusal(judge_client, "/v1/score", text_1="a", text_2=many)
    assert "2049" in refusal(judge_client, "/v1/embeddings", input=many)
    assert "2049" in refusal(judge_client, "/api/embed", input=many)


def test_many_texts_run_a_few_at_once(embedding_client: Client, embedder: LLM) -> None:
    """200 texts take several runs, and the metrics count the tokens of all: rejects a count of
    the last run alone."""
    before = embedding_client.metrics()["anydecode_prompt_tokens_total"]
    texts = [chr(97 + index % 26) * (1 + index % 3) for index in range(200)]
    found = answer(embedding_client, "/v1/embeddings", input=texts)
    assert [entry["embedding"] for entry in found["data"]] == embedder.embed(texts)
    after = embedding_client.metrics()["anydecode_prompt_tokens_total"]
    assert after - before == found["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/score", "/v1/score"])
def test_a_key_is_needed(judge: LLM, path: str) -> None:
    with served(judge, api_keys=("key",)) as client:
        assert client.http.post(path, json={"text_1": "a", "text_2": "b"}).status_code == 401


def test_the_show_endpoint_says_that_the_model_embeds(embedding_client: Client) -> None:
    assert answer(embedding_client, "/api/show", model="scripted")["capabilities"] == ["embedding"]
