"""Some ordinary English, for tests that want real text."""

PROSE = """\
The harbour lies on the north side of the bay, where the water stays calm even when the wind turns to the west. Fishing
boats leave before sunrise and come back in the early afternoon, and by four o'clock the market on the quay is empty
again. Most visitors arrive by train, walk down the hill past the old customs house, and stop at the bridge to look at
the ships. Few of them notice the small brick building behind it, which has kept the tide records since 1874.

The records are simple. Twice a day, somebody reads the height of the water from a brass scale and writes it in a book,
together with the time, the direction of the wind and the pressure of the air. For the first eighty years this was done
by the same family. When the last of them retired, the town bought an electric gauge, but the readings by hand went on,
because nobody was quite sure that the machine could be trusted. They were right to doubt it: during the great storm of
1962 the gauge stopped after two hours, while the keeper stood in the doorway with a lamp and wrote down eleven more
numbers.

Today those numbers are used by engineers who plan the new sea wall. A wall that is too low will not protect the houses,
and one that is too high costs more than the town can pay. To choose a height, they ask how often the water has reached
each mark on the scale, and how that has changed over time. The answer is not a single figure. In the first half of the
record the sea rose by about one millimetre a year; in the second half it rose by more than three. If the same trend
continues, a flood that used to come once in a century will come once in every fifteen years.

There are two ways to prepare for this. The first is to build the wall now, at its full height, and to accept that the
view from the quay will be lost. The second is to build a wide base and a low wall, and to add to it later, when it is
known how fast the water really rises. The council has chosen the second way. It is cheaper at first, it can be changed,
and it keeps the view for at least another generation. What it needs is somebody who goes on reading the scale twice a
day, and who writes down the number that is there, not the one that was expected.
"""
