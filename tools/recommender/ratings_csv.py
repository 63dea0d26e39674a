"""Ratings in a CSV file with the columns userId, movieId, rating and timestamp."""

from pathlib import Path

from tools.recommender.clicks import ClickData, column_of, make_click_data
from tools.recommender.text_table import CSV, read_text_table

COLUMNS = ("userId", "movieId", "rating", "timestamp")
_REMEDY = f"fix or delete the row (wanted: a CSV file with {','.join(COLUMNS)})"


def read_ratings_csv(path: Path, click_rating: float | None = None) -> ClickData:
    """Reads a file with the columns that MovieLens has.

    Args:
      path: of the file.
      click_rating: the least rating that is a click; None for `default_click_rating`.

    Raises:
      UserError: a file that cannot be read, or a malformed row.
    """
    table = read_text_table(path, COLUMNS, CSV, _REMEDY)
    columns = [
        column_of("user", table.texts("userId")),
        column_of("movie", table.texts("movieId")),
    ]
    ratings, timestamps = table.numbers("rating"), table.numbers("timestamp")
    return make_click_data(str(path), columns, ratings, timestamps, click_rating)
