"""The text that a language model is checked on when no other is given. Written for this purpose."""

PASSAGE = """\
The ferry to the outer islands leaves at ten past six, and in winter it leaves in the dark. Marit has driven the bread van \
onto it every weekday for eleven years, and she still reverses up the ramp as though somebody were watching, which on most \
mornings nobody is. The deckhand, a boy called Ansgar, waves her in with a torch that he has wrapped in red tape so that it \
will not blind anyone.

"You are early," he says, although she is not.

"The clock in the bakery is fast," she answers, although it is slow. They have had this conversation so often that neither \
of them needs to listen to it any more. It does the work that a handshake does elsewhere.

There are 214 loaves in the van: ninety of rye, sixty of wheat, forty that the school has ordered for its sports day, and \
twenty-four small ones with caraway, for which there is no order at all. Those are for the people who come down to the quay \
to ask. Marit counts them twice, because last Thursday she was two short, and the harbour master's wife has not forgotten \
it.

Crossing takes fifty minutes when the wind is in the west and longer when it is not. Halfway out, the engine changes its \
note, the way a person's voice changes on a staircase, and the lamps above the car deck begin to swing. From here the \
mainland is a row of lights that might be anything: a town, a train, a string of beads left on a dark table. The islands \
cannot be seen yet. One knows that they are there because the gulls fly toward something.

What does a small place need? Bread, certainly; then diesel, insulin, letters, a new hinge for the door of the church. The \
list is shorter than people think, and every item on it has to cross the same nine kilometres of water. When the strait \
froze in 1987 the bread went over on a sledge, pulled by four men and a pony, and the old people say it never tasted better. \
The young people say that anything tastes better if you have to wait a week for it. Both may be right.

At two minutes to seven the ramp goes down. Ansgar lifts his red torch; Marit starts the van, and the smell of warm rye \
rolls out in front of her over the wet concrete. Six figures are standing under the lamp by the weighing shed, with their \
collars up and their bags folded under their arms. She recognises each of them by the way they stand. If one were missing, \
she would ask; if a seventh were there, she would have a loaf for him too, because of the caraway ones, which nobody has \
ordered and which are always, without a single exception, sold before the ferry turns around.
"""
