import pytest
import torch
from support.golden import Z
from torch.testing import assert_close

from lit_diffusion.networks.conditions import (
    LabelEmbedding,
    TokenEmbedding,
    VectorEmbedding,
    WordEmbedding,
    concat_tokens,
    embed_condition,
)
from lit_diffusion.networks.layers import timestep_embedding

X = torch.zeros(3, 1, 8, 8)
TOKENS = Z((3, 4, 5), 1).float()
MASK = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])


def test_a_label_has_its_row_and_no_class_the_last():
    embedding = LabelEmbedding(10, 6)
    rows = embedding(torch.tensor([0, 9, -1, -7])).vector
    assert torch.equal(rows, embedding.weight[[0, 9, 10, 10]])


def test_a_vector_is_mapped_where_it_is_present():
    embedding, vectors = VectorEmbedding(5, 6), Z((3, 5), 1).float()
    vector = embedding((vectors, torch.tensor([True, False, True]))).vector
    assert torch.equal(vector[1], embedding.null)
    assert_close(vector[[0, 2]], embedding.proj(vectors[[0, 2]]))


def test_the_null_token_is_attended_to_where_no_other_token_is():
    embedding = TokenEmbedding(5, 6)
    _, tokens, mask = embedding((TOKENS, MASK))
    assert torch.equal(tokens[:, 0], embedding.null.expand(3, 6))
    assert mask.tolist() == torch.cat([torch.tensor([[False], [True], [False]]), MASK], 1).tolist()
    assert_close(tokens[:, 1:][MASK], embedding.proj(TOKENS[MASK]))


def test_a_word_is_its_row_and_its_position():
    embedding = WordEmbedding(5, 6)
    _, tokens, mask = embedding(torch.tensor([[3, 0, 3], [-1, -1, -1], [-9, 4, -1]]))
    positions = timestep_embedding(torch.arange(3), 6).float()
    assert_close(tokens[0, 1:], embedding.words.weight[[3, 0, 3]] + positions)
    assert_close(tokens[2, 2], embedding.words.weight[4] + positions[1])
    assert torch.equal(tokens[:, 0], embedding.null.expand(3, 6))
    expected = [[False, True, True, True], [True, False, False, False], [False, False, True, False]]
    assert mask.tolist() == expected


@pytest.mark.parametrize(
    ("embedding", "ids"),
    [
        (LabelEmbedding(10, 6), [10]),
        (LabelEmbedding(10, 6, False), [10]),
        (WordEmbedding(5, 6), [[5]]),
    ],
)
def test_ids_beyond_the_last_are_refused(embedding, ids):
    with pytest.raises(IndexError):
        embedding(torch.tensor(ids))


@pytest.mark.parametrize("kind", [VectorEmbedding, TokenEmbedding, WordEmbedding])
def test_null_embeddings_start_small(kind):
    torch.manual_seed(0)
    null = kind(5, 2048).null.detach()
    assert null.std() == pytest.approx(0.02, rel=0.1)
    assert abs(null.mean()) < 0.002


@pytest.mark.parametrize("embedding", [VectorEmbedding(5, 6), TokenEmbedding(5, 6)])
def test_embeddings_of_half_precision_as_text_encoders_give_them_fit(embedding):
    is_vector = isinstance(embedding, VectorEmbedding)
    rows, mask = (TOKENS[:, 0], MASK[:, 0]) if is_vector else (TOKENS, MASK)
    embedded = embed_condition(embedding, (rows.half(), mask), X, "Net")
    assert (embedded.vector if is_vector else embedded.tokens).dtype == torch.float32


def test_tokens_are_appended_to_those_of_the_image_which_are_all_attended_to():
    image = Z((3, 7, 6), 2)
    embedded = embed_condition(TokenEmbedding(5, 6), (TOKENS, MASK), X, "Net")
    tokens, mask = concat_tokens(image, embedded)
    assert torch.equal(tokens[:, :7], image)
    assert tokens.shape == (3, 12, 6)
    assert mask[:, :7].all()
    assert torch.equal(mask[:, 8:], MASK)
    assert concat_tokens(image, embed_condition(None, None, X, "Net"))[1] is None


WORDS = WordEmbedding(5, 6)
LABELS, VECTORS, THREE = LabelEmbedding(10, 6), VectorEmbedding(5, 6), torch.ones(3).bool()


@pytest.mark.parametrize(
    ("embedding", "condition"),
    [
        (None, torch.zeros(3).long()),
        (LABELS, torch.zeros(2).long()),
        (LABELS, torch.zeros(3)),
        (VECTORS, TOKENS[:, 0]),
        (VECTORS, (TOKENS[:, 0], THREE.float())),
        (VECTORS, (TOKENS[:, 0, :4], THREE)),
        (TokenEmbedding(5, 6), (TOKENS, MASK[:, :3])),
        (TokenEmbedding(5, 6), (TOKENS, MASK.long())),
        (TokenEmbedding(5, 6), (TOKENS[:, 0], MASK[:, 0])),
        (TokenEmbedding(5, 6), (TOKENS[:2], MASK[:2])),
        (WORDS, torch.zeros(3).long()),
        (WORDS, torch.zeros(3, 4)),
    ],
)
def test_a_condition_of_another_kind_or_size_is_refused_by_its_shapes(embedding, condition):
    parts = condition if isinstance(condition, tuple) else (condition,)
    with pytest.raises(ValueError, match=r"^Net ") as refusal:
        embed_condition(embedding, condition, X, "Net")
    assert all(f"{part.dtype} {tuple(part.shape)}" in str(refusal.value) for part in parts)
    assert embedding is None or f"{embedding.expects} with B=3" in str(refusal.value)


@pytest.mark.parametrize("parts", [(TOKENS, None), (TOKENS.tolist(), MASK)])
def test_a_condition_with_a_part_that_is_no_tensor_is_refused(parts):
    with pytest.raises(ValueError, match=r"Net takes \(tokens .*(list|NoneType)"):
        embed_condition(TokenEmbedding(5, 6), parts, X, "Net")
