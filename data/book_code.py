"""Small Python tasks of the prompt book, written for this project.

Two lines a task: `signature | arguments -> value`, then what the function does.
"""

from typing import NamedTuple


class CodeTask(NamedTuple):
    """One function to write: `signature` without `def`, `call` is the text of a call."""

    signature: str
    call: str
    value: str
    description: str


def code_tasks() -> list[CodeTask]:
    """All tasks of the table below, in its order."""
    lines = [line for line in TABLE.splitlines() if line.strip()]
    tasks = []
    for head, description in zip(lines[::2], lines[1::2], strict=True):
        signature, example = head.rsplit(" | ", 1)
        arguments, value = example.split(" -> ")
        name = signature.split("(")[0]
        tasks.append(CodeTask(signature, f"{name}({arguments})", value, description))
    return tasks


TABLE = """
widest_gap(levels: list[int]) -> int | [3, 9, 4] -> 6
Return the largest absolute difference between two neighbouring readings.
snake_to_title(name: str) -> str | "late_night_bus" -> 'Late Night Bus'
Turn a snake_case identifier into words that each start with a capital.
count_runs(text: str, letter: str) -> int | "aabaa", "a" -> 2
Count the unbroken runs of one letter.
pad_columns(rows: list[list[str]]) -> list[str] | [["a", "b"], ["cc", "d"]] -> ['a  b', 'cc d']
Join cells by one blank after padding every column but the last to its widest cell.
minutes_between(start: str, end: str) -> int | "08:50", "10:05" -> 75
Give the minutes from one HH:MM time to a later one on the same day.
every_nth(items: list, n: int) -> list | [1, 2, 3, 4, 5], 2 -> [2, 4]
Keep the items at positions n, 2n, 3n and so on, counting from one.
swap_ends(items: list) -> list | [1, 2, 3] -> [3, 2, 1]
Return a copy in which the first and the last item have changed places.
shelf_label(title: str) -> str | "The Old Sea" -> 'Old Sea, The'
Move a leading article (The, A, An) to the end, after a comma.
tallest_under(heights: list[int], limit: int) -> int | [150, 190, 171], 180 -> 171
Return the greatest height that is not above the limit, or -1 if there is none.
change_coins(amount: int, coins: list[int]) -> dict[int, int] | 7, [5, 1] -> {5: 1, 1: 2}
Pay an amount by taking as many of each coin as possible, largest coin first.
is_leap(year: int) -> bool | 1900 -> False
Tell whether a year of the Gregorian calendar has a 29th of February.
mask_card(number: str) -> str | "12345678" -> '****5678'
Replace everything except the final four characters by stars.
merge_sorted(left: list[int], right: list[int]) -> list[int] | [1, 4], [2, 3] -> [1, 2, 3, 4]
Merge two ascending lists into one ascending list in a single pass.
dial_distance(a: int, b: int, size: int) -> int | 1, 9, 10 -> 2
Give the shortest number of clicks between two marks on a round dial.
count_islands(row: str) -> int | "~##~#~" -> 2
Count the groups of adjacent # signs in a string of water and land.
bounding_box(points: list[tuple[int, int]]) -> tuple | [(1, 5), (4, 2)] -> (1, 2, 4, 5)
Return the lowest x, lowest y, highest x and highest y.
drop_comments(lines: list[str]) -> list[str] | ["x = 1", "# note"] -> ['x = 1']
Remove the lines whose first visible character is a hash sign.
initials(full_name: str) -> str | "ada maria king" -> 'A.M.K.'
Give the capital initials of a name, each followed by a full stop.
discount(price: float, percent: float) -> float | 80.0, 25 -> 60.0
Lower a price by a percentage and round to two decimals.
zigzag(items: list[int]) -> list[int] | [5, 6, 7] -> [5, 7, 6]
Take items alternately from the front and from the back.
water_bill(litres: int) -> int | 120 -> 140
Charge 1 cent a litre for the first 100 litres and 2 cents for each further litre.
longest_streak(days: list[bool]) -> int | [True, True, False, True] -> 2
Find the greatest number of consecutive true values.
rotate_word(word: str, steps: int) -> str | "train", 2 -> 'aintr'
Move the first letters of a word to its end, step by step.
invert_map(mapping: dict[str, int]) -> dict[int, list[str]] | {"a": 1, "b": 1} -> {1: ['a', 'b']}
Collect the keys that share a value, in alphabetical order.
first_repeat(items: list[str]) -> str | ["x", "y", "x"] -> 'x'
Return the first item met a second time, or an empty string.
fold_strip(length: float, times: int) -> float | 80.0, 3 -> 10.0
Give the length of a paper strip after folding it in half several times.
clamp(value: int, low: int, high: int) -> int | 12, 0, 10 -> 10
Limit a value to the interval from low to high.
seat_row(seat: int, width: int) -> int | 13, 6 -> 3
Give the row, counted from one, in which a numbered seat lies.
pair_up(names: list[str]) -> list[tuple] | ["a", "b", "c", "d"] -> [('a', 'd'), ('b', 'c')]
Pair the first name with the last, the second with the one before the last, and so on.
count_words_longer(text: str, size: int) -> int | "the quick fox", 3 -> 1
Count the words with more letters than the given size.
matrix_border(grid: list[list[int]]) -> int | [[1, 2], [3, 4]] -> 10
Sum the numbers that lie on the outer edge of a grid.
transpose_text(lines: list[str]) -> list[str] | ["ab", "cd"] -> ['ac', 'bd']
Read the columns of equally long lines from left to right as new lines.
stair_ways(steps: int) -> int | 4 -> 5
Count the ways to climb stairs by taking one or two steps at a time.
replace_letters(text: str, table: dict[str, str]) -> str | "cafe", {"e": "E"} -> 'cafE'
Replace every character that the table names and leave the others.
longest_prefix(first: str, second: str) -> str | "lantern", "landing" -> 'lan'
Return the longest beginning that two strings have in common.
bits_set(number: int) -> int | 11 -> 3
Count the ones in the binary form of a non-negative number.
parse_pairs(text: str) -> dict[str, str] | "a=1;b=2" -> {'a': '1', 'b': '2'}
Read key=value pairs separated by semicolons.
moving_mean(values: list[float], width: int) -> list[float] | [1.0, 3.0, 5.0], 2 -> [2.0, 4.0]
Average every window of the given width.
is_ladder(words: list[str]) -> bool | ["cat", "cot", "dot"] -> True
Tell whether each word differs from the next in exactly one letter.
tally(votes: list[str]) -> list[tuple[str, int]] | ["b", "a", "b"] -> [('b', 2), ('a', 1)]
Count the votes and list them from most to fewest, equal counts by name.
nth_weekday(first_day: int, n: int) -> int | 3, 10 -> 5
Number the weekdays 0 to 6 and give the weekday n - 1 days after the first.
wrap_text(text: str, width: int) -> list[str] | "one two three", 7 -> ['one two', 'three']
Break a text at blanks into lines no longer than the width.
deep_sum(nested: list) -> int | [1, [2, [3]]] -> 6
Add all the numbers of a list that may hold lists inside lists.
peak_positions(values: list[int]) -> list[int] | [1, 5, 2, 7, 3] -> [1, 3]
List the indices whose value is greater than both neighbours.
shared_friends(a: list[str], b: list[str]) -> list[str] | ["Mei", "Otto"], ["Otto"] -> ['Otto']
List alphabetically the names that occur in both lists.
to_roman_hours(hour: int) -> str | 9 -> 'IX'
Write an hour from 1 to 12 as a Roman numeral.
undo_moves(moves: str) -> str | "NNE" -> 'WSS'
Give the compass moves that lead back to the start, in order.
clean_spaces(text: str) -> str | "  a   b " -> 'a b'
Shorten each stretch of blanks to one blank and trim both ends.
ticket_price(age: int) -> int | 70 -> 6
Return 0 below the age of 5, 6 from 65 on, and 10 for everybody else.
split_bill(total: int, people: int) -> list[int] | 10, 3 -> [4, 3, 3]
Share whole cents as evenly as possible, larger shares first.
has_cycle(links: dict[str, str], start: str) -> bool | {"a": "b", "b": "a"}, "a" -> True
Follow links from a start and tell whether a node is visited twice.
safe_divide(a: float, b: float) -> float | 3.0, 0.0 -> 0.0
Divide two numbers, giving zero when the divisor is zero.
sort_versions(versions: list[str]) -> list[str] | ["1.10", "1.9"] -> ['1.9', '1.10']
Sort dotted version numbers by their numeric parts.
find_missing(numbers: list[int]) -> int | [1, 2, 4] -> 3
The list holds the numbers from 1 to n + 1 in any order except one: find that one.
hours_to_text(minutes: int) -> str | 135 -> '2 h 15 min'
Write a number of minutes as hours and minutes.
ring_area(outer: float, inner: float) -> float | 2.0, 1.0 -> 9.42
Give the area between two circles with one centre, rounded to two decimals.
chunk(items: list[int], size: int) -> list[list[int]] | [1, 2, 3, 4, 5], 2 -> [[1, 2], [3, 4], [5]]
Cut a list into parts of a given size, with a shorter last part if needed.
ends_match(words: list[str]) -> bool | ["tea", "apple", "egg"] -> True
Tell whether each word starts with the last letter of the word before it.
grade_curve(marks: list[int]) -> list[int] | [40, 70, 90] -> [50, 80, 100]
Raise all marks by the same amount so that the best one becomes 100.
count_inversions(items: list[int]) -> int | [3, 1, 2] -> 2
Count the pairs in which a larger number stands before a smaller one.
caesar_digit(code: str, shift: int) -> str | "289", 3 -> '512'
Add a shift to every digit of a code, starting again at zero after nine.
overlap(a: tuple[int, int], b: tuple[int, int]) -> int | (1, 5), (3, 9) -> 2
Give the length that two intervals have in common, or zero.
unique_rows(rows: list[list[int]]) -> int | [[1, 2], [2, 1], [1, 2]] -> 2
Count the different rows of a table.
vertical(word: str) -> str | "sun" -> 's\\nu\\nn'
Write the letters of a word below one another.
cheapest(menu: dict[str, float]) -> str | {"soup": 4.5, "rice": 3.0} -> 'rice'
Return the name of the dish with the lowest price.
collapse_ranges(pages: list[int]) -> str | [1, 2, 3, 7] -> '1-3, 7'
Write an ascending list of page numbers with ranges for neighbours.
alternate_case(text: str) -> str | "river" -> 'RiVeR'
Write the letters in capitals and small letters by turns.
battery_left(start: int, drains: list[int]) -> int | 50, [20, 40] -> 0
Subtract drains one after another and never go below zero.
knight_moves(column: int, row: int) -> int | 1, 1 -> 2
Count the squares of an 8 x 8 board that a knight can reach in one move.
word_positions(text: str) -> dict[str, list[int]] | "a b a" -> {'a': [0, 2], 'b': [1]}
Map every word to the places at which it stands.
mirror_number(n: int) -> int | 120 -> 21
Reverse the decimal digits of a positive number.
same_shape(a: list[list[int]], b: list[list[int]]) -> bool | [[1, 2]], [[3, 4]] -> True
Tell whether two tables have equal row lengths in the same order.
toggle_lamps(count: int, switches: list[int]) -> list[bool] | 3, [0, 2, 0] -> [False, False, True]
All lamps start dark; each switch flips the lamp of its index.
expand(code: str) -> str | "a3b1" -> 'aaab'
Expand letters that are each followed by a one-digit count.
compass(degrees: int) -> str | 100 -> 'E'
Name the nearest of the four compass points N, E, S and W.
balance_point(weights: list[int]) -> int | [2, 3, 5] -> 2
Return the smallest count of leading weights whose sum reaches half of the total.
slugify(title: str) -> str | "Hello, Big World!" -> 'hello-big-world'
Keep letters and digits in lower case and join the words with hyphens.
count_squares(side: int) -> int | 2 -> 5
Count the squares of all sizes in a grid of side times side cells.
longest_word(sentence: str) -> str | "a small brown bear" -> 'small'
Return the first of the longest words.
running_best(scores: list[int]) -> list[bool] | [3, 1, 5] -> [True, False, True]
Mark each score that beats all the scores before it.
add_times(times: list[str]) -> str | ["0:45", "1:30"] -> '2:15'
Add durations written as hours:minutes.
domain_of(address: str) -> str | "mei@post.example" -> 'post.example'
Return the part of an e-mail address after the at sign.
is_sorted_by_length(words: list[str]) -> bool | ["a", "to", "be"] -> True
Tell whether no word is shorter than the word before it.
drop_lowest(marks: list[int]) -> float | [2, 8, 6] -> 7.0
Average the marks after leaving out a single lowest one.
lamp_posts(length: int, gap: int) -> int | 100, 25 -> 5
Count the posts along a street with one at both ends.
count_substitutions(a: str, b: str) -> int | "stone", "stove" -> 1
Count the places at which two equally long words differ.
choose_seats(rows: list[str]) -> list[int] | ["xx-x", "--xx"] -> [2, 0]
For each row give the index of the first free seat (a hyphen), or -1.
prefix_sums(values: list[int]) -> list[int] | [1, 2, 3] -> [0, 1, 3, 6]
List the sums of the first 0, 1, 2, ... values.
depth(path: str) -> int | "/home/mei/notes" -> 3
Count the named parts of a file path.
extension(filename: str) -> str | "photo.old.png" -> 'png'
Return what follows the last dot, or an empty string if there is no dot.
frequency_sort(text: str) -> str | "abb" -> 'bba'
Sort letters by how often they occur, then alphabetically.
cross_sum(n: int) -> int | 2503 -> 10
Add up the decimal digits.
repeat_until(word: str, size: int) -> str | "la", 5 -> 'lalal'
Repeat a word and cut the result to the wanted length.
spiral(grid: list[list[int]]) -> list[int] | [[1, 2], [4, 3]] -> [1, 2, 3, 4]
Read a grid clockwise from its top left corner inwards.
fill_gaps(values: list[int | None]) -> list[int] | [4, None, 6] -> [4, 4, 6]
Replace each missing value by the last one known; the first is always known.
podium(times: dict[str, float]) -> list[str] | {"a": 9.9, "b": 9.7, "c": 10.4} -> ['b', 'a', 'c']
List up to three runners from fastest to slowest.
power_of_two(n: int) -> bool | 64 -> True
Tell whether a positive number is a power of two, without loops.
least_multiple(a: int, b: int) -> int | 4, 6 -> 12
Find the smallest positive number that both arguments divide.
wind_chill_label(celsius: int) -> str | -12 -> 'severe'
Return mild above 0, cold from 0 down to -9, and severe below that.
quote_cell(cell: str) -> str | "a,b" -> '"a,b"'
Put a cell into double quotes if it contains a comma, else return it unchanged.
nearest(values: list[int], goal: int) -> int | [1, 8, 12], 9 -> 8
Return the value with the smallest distance from the goal, the smaller one on a tie.
shift_schedule(days: int, team: list[str]) -> list[str] | 3, ["A", "B"] -> ['A', 'B', 'A']
Assign one person a day, going round the team.
count_pairs(values: list[int], total: int) -> int | [1, 4, 2, 3], 5 -> 2
Count the index pairs whose values add up to the total.
trim_extremes(values: list[int]) -> list[int] | [9, 1, 5] -> [5]
Remove one smallest and one largest value and keep the order of the rest.
binary_search(values: list[int], goal: int) -> int | [2, 5, 8], 8 -> 2
Return the index of the goal in an ascending list, or -1.
group_by_initial(words: list[str]) -> dict[str, list[str]] | ["ant", "ape"] -> {'a': ['ant', 'ape']}
Group words by their first letter, keeping their order.
triangle_kind(a: int, b: int, c: int) -> str | 3, 3, 5 -> 'isosceles'
Classify three valid side lengths as equilateral, isosceles or scalene.
sum_of_squares_until(limit: int) -> int | 10 -> 14
Add the squares that are not above the limit.
decode_morse(code: str, table: dict[str, str]) -> str | "... ---", {"...": "S", "---": "O"} -> 'SO'
Translate blank-separated signals with the help of a table.
is_anagram(a: str, b: str) -> bool | "listen", "silent" -> True
Tell whether two words use the same letters equally often.
rain_total(log: list[str]) -> int | ["Mon 3", "Tue 5"] -> 8
Add the numbers at the end of log lines.
bubble_passes(items: list[int]) -> int | [2, 1, 3] -> 1
Count the passes of bubble sort in which at least one swap happens.
flatten_once(lists: list[list[int]]) -> list[int] | [[1], [2, 3]] -> [1, 2, 3]
Join the inner lists into one list.
most_common_pair(text: str) -> str | "banana" -> 'an'
Return the two-letter piece that occurs most often, the earliest on a tie.
countdown(start: int) -> list[str] | 2 -> ['2', '1', 'go']
List the numbers down to one as text and end with the word go.
digits_to_words(n: int) -> str | 40 -> 'four zero'
Spell out every digit of a number.
remove_at(items: list, positions: list[int]) -> list | ["a", "b", "c"], [0, 2] -> ['b']
Leave out the items at the given positions.
diagonal_sum(grid: list[list[int]]) -> int | [[1, 2], [3, 4]] -> 5
Add the numbers on the diagonal from top left to bottom right.
next_bus(now: int, times: list[int]) -> int | 610, [600, 620] -> 10
Give the minutes to wait for the next departure, or -1 when none is left today.
paint_needed(walls: list[tuple[int, int]], per_litre: int) -> float | [(2, 5)], 10 -> 1.0
Sum the wall areas and divide by what a litre covers.
censor(text: str, banned: list[str]) -> str | "a bad day", ["bad"] -> 'a *** day'
Replace each banned word by stars of equal number.
max_profit(prices: list[int]) -> int | [7, 2, 6] -> 4
Find the best gain from buying once and selling later, or zero.
levels(text: str) -> int | "a > b > c" -> 3
Count the parts of a breadcrumb trail that are separated by > signs.
common_multiple_days(a: int, b: int, limit: int) -> int | 2, 3, 20 -> 3
Count the days up to the limit that both a and b divide.
insert_sorted(values: list[int], new: int) -> list[int] | [1, 5], 3 -> [1, 3, 5]
Return a new ascending list with one more value.
vowel_share(text: str) -> float | "audio" -> 0.8
Give the share of the letters that are vowels.
rock_paper(a: str, b: str) -> int | "rock", "paper" -> 2
Return 1 or 2 for the winner of rock, paper, scissors and 0 for a draw.
valid_pin(pin: str) -> bool | "1123" -> False
A PIN is valid when it has four digits and no digit twice in a row.
hex_colour(red: int, green: int, blue: int) -> str | 255, 0, 16 -> '#ff0010'
Write a colour as a hash sign and six hexadecimal digits.
pluralize(count: int, noun: str) -> str | 2, "cat" -> '2 cats'
Write a count with its noun and add an s unless the count is one.
median_of_three(a: int, b: int, c: int) -> int | 5, 1, 3 -> 3
Return the number that is neither the smallest nor the largest.
count_sundays(first: int, days: int) -> int | 5, 10 -> 2
Days are numbered 0 to 6 with 6 as Sunday; count the Sundays in a span of days.
jump_game(hops: list[int]) -> bool | [2, 0, 1] -> True
From index i you may move up to hops[i] places on: tell whether the end can be reached.
justify(words: list[str], width: int) -> str | ["a", "b"], 4 -> 'a  b'
Spread the gaps between words so that the line has exactly the given width.
apply_edits(text: str, edits: list[tuple[str, str]]) -> str | "one", [("o", "0")] -> '0ne'
Apply replacements one after another.
perimeter(cells: set[tuple[int, int]]) -> int | {(0, 0), (0, 1)} -> 6
Count the outer edges of a shape made of unit cells.
split_camel(name: str) -> list[str] | "openFileNow" -> ['open', 'File', 'Now']
Split a camelCase name before each capital letter.
leaders(values: list[int]) -> list[int] | [4, 7, 3, 5] -> [7, 5]
List the values that are greater than everything to their right.
stock_after(stock: dict[str, int], sold: dict[str, int]) -> dict | {"a": 5}, {"a": 2} -> {'a': 3}
Subtract what was sold and drop goods that reach zero.
missing_letters(text: str, alphabet: str) -> str | "cab", "abcd" -> 'd'
List the letters of the alphabet that the text does not use.
square_root_floor(n: int) -> int | 17 -> 4
Find the largest integer whose square is not above n, using integers only.
evaluate_rpn(tokens: list[str]) -> int | ["2", "3", "+"] -> 5
Evaluate an expression in reverse Polish notation with +, - and *.
late_fee(days: int) -> float | 10 -> 3.5
Charge nothing for three days and half a coin for each day after that.
count_between(values: list[int], low: int, high: int) -> int | [1, 5, 9], 2, 9 -> 2
Count the values from low to high, both included.
find_row(rows: list[dict], key: str, value: str) -> dict | [{"k": "x"}], "k", "x" -> {'k': 'x'}
Return the first row in which the key has the value, or an empty dictionary.
blend(a: str, b: str) -> str | "abc", "12" -> 'a1b2c'
Weave two strings letter by letter and append what is left over.
harmonic(n: int) -> float | 3 -> 1.833
Add 1, 1/2, 1/3 up to 1/n and round to three decimals.
sum_digits_until_single(n: int) -> int | 987 -> 6
Add the digits again and again until one digit remains.
largest_drop(values: list[int]) -> int | [9, 4, 6, 1] -> 8
Find the biggest fall from an earlier value to a later one.
tree_height(children: dict[str, list[str]], root: str) -> int | {"a": ["b"], "b": []}, "a" -> 2
Count the nodes on the longest way from the root to a leaf.
reachable(edges: dict[int, list[int]], start: int) -> set[int] | {1: [2], 2: []}, 1 -> {1, 2}
Collect all nodes that can be reached from the start, the start included.
normalise_scores(scores: list[float]) -> list[float] | [1.0, 3.0] -> [0.25, 0.75]
Divide every score by the sum of all scores.
mark_weekends(days: list[str]) -> list[str] | ["Fri", "Sat"] -> ['Fri', 'Sat*']
Put a star behind the names Sat and Sun.
"""
