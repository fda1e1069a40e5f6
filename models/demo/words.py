"""Closed vocabularies and phrasings of the order-desk language.

Every value is a short word or number, so that a model of a few million parameters can copy it. Nothing here
is random: the generator draws from these tables with its own seeded source.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES = (
    "Mara Nils Ada Bruno Clara David Elena Felix Greta Hugo Iris Jonas Karin Leo Mina Noah Olga Paul Rosa Simon "
    "Tara Ulrich Vera Walter Yara Zeno Anna Boris Celia Diego Emma Franz Gina Hanna Ivan Julia Kofi Lena Marco Nadia"
).split()
CITIES = (
    "Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Dublin Athens Warsaw Zurich Milan Lyon Porto Bergen Turin "
    "Ghent Basel Graz Malmo Riga Tallinn Vilnius Sofia Cairo Lima Quito Kyoto Delhi"
).split()
ITEMS = (
    "lamps chairs tables pens mugs bags boots shirts hats clocks books plates forks knives towels pillows ropes "
    "tents bikes drums flutes vases carpets mirrors"
).split()
COLORS = "blue red green black white yellow purple orange silver brown".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PAYMENTS = "card cash invoice transfer voucher check".split()
SUPPLIERS = "Polar Norden Atlas Orion Delta Vega Titan Nova Luna Sirius Argo Helix".split()
STATUSES = ("open", "packed", "shipped")
# Letters that are not words of their own; an order number is one letter and two digits, and no two orders of a
# conversation share the letter.
ORDER_LETTERS = "BCDEFGHJKLMNPQRSTUVWXYZ"


@dataclass(frozen=True)
class Attribute:
    """One kind of fact that a user can tell about a customer or an item.

    `statement` is the canonical sentence, used by the agent both to confirm and to recall. `tells` and `asks` are
    the user's phrasings. All hold `{who}`; statements and tells also hold `{value}`.
    """

    key: str
    subject: str  # "customer" or "item"
    noun: str
    statement: str
    tells: tuple[str, ...]
    asks: tuple[str, ...]


ATTRIBUTES = (
    Attribute(
        "city", "customer", "city", "{who} lives in {value}.",
        ("{who} lives in {value}.", "{who} moved to {value}.", "The city of {who} is {value}."),
        ("Where does {who} live?", "What is the city of {who}?", "Which city did I give you for {who}?"),
    ),
    Attribute(
        "day", "customer", "delivery day", "{who} wants delivery on {value}.",
        ("{who} wants delivery on {value}.", "The delivery day of {who} is {value}.", "Deliver to {who} on {value}."),
        ("When does {who} want delivery?", "What is the delivery day of {who}?", "Which day did {who} choose?"),
    ),
    Attribute(
        "color", "customer", "color", "{who} likes {value}.",
        ("{who} likes {value}.", "The color of {who} is {value}.", "{who} prefers the color {value}."),
        ("Which color does {who} like?", "What is the color of {who}?", "Which color did I give you for {who}?"),
    ),
    Attribute(
        "payment", "customer", "payment", "{who} pays by {value}.",
        ("{who} pays by {value}.", "The payment of {who} is by {value}.", "{who} wants to pay by {value}."),
        ("How does {who} pay?", "What is the payment of {who}?", "How does {who} want to pay?"),
    ),
    Attribute(
        "discount", "customer", "discount", "{who} has a discount of {value} percent.",
        ("{who} has a discount of {value} percent.", "The discount of {who} is {value} percent.",
         "{who} gets {value} percent off."),
        ("What is the discount of {who}?", "Which discount does {who} have?", "How many percent does {who} get off?"),
    ),
    Attribute(
        "locker", "customer", "locker", "{who} has locker {value}.",
        ("{who} has locker {value}.", "The locker of {who} is {value}.", "{who} uses locker {value}."),
        ("Which locker does {who} have?", "What is the locker of {who}?", "Which locker does {who} use?"),
    ),
    Attribute(
        "shelf", "item", "shelf", "The {who} are on shelf {value}.",
        ("The {who} are on shelf {value}.", "The shelf of the {who} is {value}.",
         "We keep the {who} on shelf {value}."),
        ("Where are the {who}?", "What is the shelf of the {who}?", "On which shelf are the {who}?"),
    ),
    Attribute(
        "supplier", "item", "supplier", "The {who} come from {value}.",
        ("The {who} come from {value}.", "The supplier of the {who} is {value}.", "We buy the {who} from {value}."),
        ("Who makes the {who}?", "What is the supplier of the {who}?", "Where do the {who} come from?"),
    ),
)  # fmt: skip

TELL_PREFIXES = ("", "", "", "Please note: ", "Remember: ", "For later: ")
ASK_PREFIXES = ("", "", "", "Remind me: ", "Tell me: ", "Again please: ")

# (what a user says, reasoning, answer)
SMALL_TALK: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("Hello!", "Hello", "Hi", "Hi!", "hello", "hi", "Hey", "Hey!", "Hi there!", "Hello there!", "Good morning!",
         "Good morning", "Good evening!", "Good day!", "Hello, how are you?", "Hi, how are you?"),
        "A greeting.",
        "Hello! I am the order desk. How can I help?",
    ),
    (
        ("What can you do?", "Who are you?", "Help", "help", "What are you?", "How can you help me?",
         "Hello, who are you?", "Hi, what can you do?", "Can you help me?", "What do you do?", "What is this?"),
        "I say what I can do.",
        "I am the order desk. I look up orders, prices and stock, change orders, and remember what you tell me.",
    ),
    (
        ("Thanks!", "Thank you!", "Thanks", "Thank you", "Great, thanks!", "Thank you very much!", "Thanks a lot!",
         "Very good.", "Great!", "OK", "OK, thanks."),
        "The user is happy.",
        "You are welcome.",
    ),
    (
        ("Bye!", "Goodbye!", "Bye", "See you later!", "That is all.", "That is all for today."),
        "The user leaves.",
        "Goodbye!",
    ),
    (
        ("How are you?", "Are you well?", "How is it going?", "How do you feel?"),
        "Small talk.",
        "I am fine, thank you. How can I help?",
    ),
    (
        ("Tell me a joke.", "What is the weather today?", "Write a poem about the sea.",
         "What is the capital of France?",
         "Tell me a story.", "Who won the game?", "Explain gravity.", "What is the meaning of life?",
         "Write a program that sorts a list.", "Sing a song.", "What time is it?", "Do you like music?",
         "Why is the sky blue?", "Say something in French.", "What is your favorite movie?",
         "Give me a recipe for soup.",
         "How old are you?", "Name three colors.", "Tell me about the moon.",
         "Translate this to German.", "Who is the president?", "Recommend a book.", "Count to ten."),
        "This is not about orders.",
        "I can only help with orders, prices, stock and notes.",
    ),
)  # fmt: skip

NO_TOOLS_REASONING = "I have no tools here."
NO_TOOLS_ANSWER = "I cannot look that up, because I have no tools here."
