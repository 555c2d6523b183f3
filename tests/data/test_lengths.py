from datasets import Dataset

from lightning_fsdp2.data.lengths import LengthStatistics, measure_lengths

LENGTHS = [*range(1, 100), 2000]


def measure(sequences=60, empty=0):
    # of the longest, nothing is left to learn
    answers = [length // 2 + 1 for length in LENGTHS[:-1]] + [0]
    rows = Dataset.from_dict(
        {"length": LENGTHS, "answer_tokens": answers, "is_empty": [index < empty for index in range(100)]}
    )
    return measure_lengths(rows, sequences=sequences, sequence_length=90)


def test_lengths_are_those_before_the_cut_and_the_fill_that_behind_it():
    assert measure() == LengthStatistics(
        conversations=100,
        tokens=sum(LENGTHS),
        answer_tokens=sum(length // 2 + 1 for length in LENGTHS[:-1]),
        median=50,
        percentile_95=95,
        longest=2000,
        cut=10,
        left_out=1,
        empty=0,
        sequences=60,
        fill=(sum(range(1, 91)) + 9 * 90) / (60 * 90),
    )


def test_one_line_describes_them():
    assert measure().describe("training", 90) == (
        "training: 100 conversations of 6,950 tokens, 2,549 of them in answers; median 50, 95 % up to 95, longest 2,000"
        "; 60 sequences of 90, 90.8% full"
    )
    assert measure(None).describe("test", 90).endswith("longest 2,000")


def test_warning_counts_what_is_cut_and_left_out():
    assert measure().get_optional_warning("training", 90) == (
        "training: 10 of 100 conversations are longer than sequence_length=90 and are cut at their end; 1 have no"
        " answer left and are left out. Use longer sequences to keep them whole."
    )
    rows = Dataset.from_dict({"length": [3], "answer_tokens": [1], "is_empty": [False]})
    assert measure_lengths(rows, sequences=1, sequence_length=90).get_optional_warning("training", 90) is None


def test_warning_counts_conversations_with_empty_answers():
    warning = measure(empty=7).get_optional_warning("training", 5000)
    assert "training: 7 of 100 conversations have only empty answers" in warning
