"""The words the seed is made of: people, places, products and what customers write.

Only data; `generate_seed.py` draws from it. Changing a list changes the seed, so `seed.sql` must be
written anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# fmt: off
FIRST_NAMES = (
    "Amara", "Anders", "Anika", "Arturo", "Beatriz", "Bilal", "Bianca", "Carmen", "Cedric", "Chiara",
    "Dalia", "Damian", "Daphne", "Darius", "Edith", "Elif", "Emeka", "Esteban", "Fatima", "Felix", "Fiona",
    "Gareth", "Gemma", "Giulia", "Hanna", "Hassan", "Helena", "Hugo", "Imani", "Ingrid", "Isaac", "Ivana",
    "Jamal", "Janelle", "Jasper", "Joaquin", "Kamila", "Keiko", "Kofi", "Lars", "Latisha", "Leila",
    "Lorenzo", "Lucia", "Magnus", "Malik", "Marisol", "Mateo", "Mei", "Milan", "Nadia", "Naveen", "Nina",
    "Noor", "Octavio", "Olga", "Omar", "Paloma", "Pavel", "Petra", "Priya", "Quentin", "Rafael", "Ramona",
    "Rosa", "Ruben", "Sabine", "Samir", "Selma", "Simone", "Stefan", "Tamara", "Tariq", "Theo", "Tova",
    "Uma", "Valeria", "Viktor", "Wanda", "Xenia", "Yara", "Yusuf", "Zadie", "Zoltan",
)

LAST_NAMES = (
    "Abernathy", "Adeyemi", "Almeida", "Andersson", "Bakker", "Barlow", "Becerra", "Bergstrom", "Blackwood",
    "Brandt", "Cabrera", "Calloway", "Castellano", "Chaudhry", "Cho", "Coleman", "Dalton", "Delacroix",
    "Demir", "Dimitrov", "Donovan", "Eastwood", "Ekström", "Escobar", "Farrow", "Ferreira", "Fitzgerald",
    "Fontaine", "Fujimoto", "Gallagher", "Ganesan", "Goldberg", "Grimaldi", "Haddad", "Halloran",
    "Hendricks", "Holloway", "Ibrahim", "Iyer", "Jankowski", "Jaramillo", "Kaplan", "Karlsson", "Kowalczyk",
    "Lachance", "Larkin", "Leclerc", "Lindqvist", "Lombardi", "MacLeod", "Maldonado", "Marchetti", "Mbeki",
    "Medina", "Mishra", "Nakagawa", "Navarro", "Novak", "O'Brien", "O'Connell", "Okafor", "Olsen", "Ortega",
    "Osei", "Pacheco", "Pappas", "Petrov", "Pham", "Quigley", "Rasmussen", "Reyes", "Rinaldi", "Rojas",
    "Saito", "Salazar", "Santoro", "Schreiber", "Shapiro", "Sorensen", "Stanton", "Sundaram", "Takeda",
    "Thibault", "Torres", "Ueda", "Valdez", "Vandermeer", "Vasquez", "Weatherby", "Whitfield", "Wójcik",
    "Yamashita", "Yilmaz", "Zapata", "Zimmerman",
)

# (city, region, first three digits of the postal code, country)
CITIES = (
    ("Portland", "OR", "972", "US"), ("Seattle", "WA", "981", "US"), ("Denver", "CO", "802", "US"),
    ("Austin", "TX", "787", "US"), ("Chicago", "IL", "606", "US"), ("Boston", "MA", "021", "US"),
    ("Atlanta", "GA", "303", "US"), ("Madison", "WI", "537", "US"), ("Tucson", "AZ", "857", "US"),
    ("Raleigh", "NC", "276", "US"), ("Nashville", "TN", "372", "US"), ("Minneapolis", "MN", "554", "US"),
    ("Sacramento", "CA", "958", "US"), ("San Diego", "CA", "921", "US"), ("Oakland", "CA", "946", "US"),
    ("Philadelphia", "PA", "191", "US"), ("Pittsburgh", "PA", "152", "US"), ("Columbus", "OH", "432", "US"),
    ("Detroit", "MI", "482", "US"), ("Boise", "ID", "837", "US"), ("Salt Lake City", "UT", "841", "US"),
    ("Albuquerque", "NM", "871", "US"), ("Kansas City", "MO", "641", "US"), ("Omaha", "NE", "681", "US"),
    ("Richmond", "VA", "232", "US"), ("Tampa", "FL", "336", "US"), ("Orlando", "FL", "328", "US"),
    ("Burlington", "VT", "054", "US"), ("Providence", "RI", "029", "US"), ("Buffalo", "NY", "142", "US"),
    ("Brooklyn", "NY", "112", "US"), ("New Orleans", "LA", "701", "US"), ("Louisville", "KY", "402", "US"),
    ("Anchorage", "AK", "995", "US"), ("Toronto", "ON", "M5V", "CA"), ("Vancouver", "BC", "V6B", "CA"),
    ("Montreal", "QC", "H2Y", "CA"),
)

STREETS = (
    "Alder Court", "Beacon Street", "Birch Lane", "Canal Street", "Cedar Avenue", "Chestnut Street",
    "Clover Road", "Cypress Way", "Dogwood Drive", "Elm Street", "Fairview Avenue", "Garden Terrace",
    "Harbor Road", "Hawthorn Street", "Highland Avenue", "Juniper Street", "Lakeview Drive",
    "Linden Boulevard", "Magnolia Street", "Maple Avenue", "Meadow Lane", "Mill Road", "Orchard Street",
    "Pine Street", "Quarry Road", "Ridge Road", "River Street", "Spruce Street", "Sycamore Lane",
    "Vine Street", "Walnut Street", "Willow Way",
)

LINES = (
    "Alpenglow", "Bluestem", "Borealis", "Brightwater", "Cascade", "Cinder", "Coastline", "Copperleaf",
    "Driftwood", "Everdale", "Fernhill", "Foxglove", "Granite", "Harbor", "Hearth", "Highmoor", "Ironwood",
    "Juniper", "Kestrel", "Larkspur", "Lumen", "Marlow", "Meridian", "Northfold", "Oakhaven", "Orbit",
    "Pinecrest", "Quill", "Redstone", "Saltmarsh", "Sierra", "Slate", "Solstice", "Tidewater", "Timberline",
    "Umber", "Vesper", "Wayfarer", "Willowbrook", "Zephyr",
)

BRANDS = (
    "Arden & Pike", "Bergwerk", "Common Thread", "Dunmore", "Eastlake Supply", "Fable House", "Greyline",
    "Halden", "Isle Works", "Kindred Goods", "Lowell Bros.", "Mistral", "Norrland", "Otter Creek",
    "Palisade", "Quayside", "Rowan Labs", "Stillwater", "Tern", "Vantage",
)

COLORS = (
    ("black", "BLK"), ("charcoal", "CHR"), ("navy", "NVY"), ("forest", "FOR"), ("sand", "SND"),
    ("rust", "RST"), ("white", "WHT"), ("sky", "SKY"), ("plum", "PLM"), ("mustard", "MUS"),
)
APPAREL_SIZES = (("XS", "XS"), ("S", "S"), ("M", "M"), ("L", "L"), ("XL", "XL"))
SHOE_SIZES = (("7", "07"), ("8", "08"), ("9", "09"), ("10", "10"), ("11", "11"), ("12", "12"))
STORAGE = (("64 GB", "064"), ("128 GB", "128"), ("256 GB", "256"))
BED_SIZES = (("twin", "TW"), ("queen", "QN"), ("king", "KG"))
VOLUMES = (("small", "SM"), ("medium", "MD"), ("large", "LG"))
SCENTS = (("unscented", "UNS"), ("cedar", "CED"), ("citrus", "CIT"), ("lavender", "LAV"))
PIECES = (("500 pieces", "500"), ("1000 pieces", "1K"))
FORMATS = (("lined", "LIN"), ("dotted", "DOT"), ("plain", "PLN"))

Options = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Category:
    """One shelf. `axes` are the options of its variants; a later value of an axis in `dearer` costs more."""

    department: str
    name: str
    code: str
    nouns: tuple[str, ...]
    dollars: tuple[int, int]
    axes: tuple[tuple[str, Options], ...]
    pitch: str
    dearer: str | None = None


def _shelf(
    department: str,
    name: str,
    code: str,
    nouns: str,
    dollars: tuple[int, int],
    axes: Mapping[str, Options],
    pitch: str,
    dearer: str | None = None,
) -> Category:
    return Category(
        department, name, code, tuple(nouns.split("|")), dollars, tuple(axes.items()), pitch, dearer
    )


_SIZED = {"color": COLORS, "size": APPAREL_SIZES}
_COLORED = {"color": COLORS}

CATEGORIES = (
    _shelf("Clothing", "Jackets", "JKT",
        "Rain Jacket|Down Jacket|Fleece Jacket|Windbreaker|Parka|Softshell|Field Coat", (69, 240), _SIZED,
        "keeps weather out and packs into its own pocket"),
    _shelf("Clothing", "Shirts", "SHT",
        "Oxford Shirt|Flannel Shirt|Linen Shirt|Henley|T-Shirt|Polo|Chambray Shirt", (22, 79), _SIZED,
        "soft from the first wash and cut for layering"),
    _shelf("Clothing", "Trousers", "TRS",
        "Chinos|Hiking Pants|Joggers|Corduroys|Wool Trousers|Cargo Pants|Jeans", (45, 129), _SIZED,
        "with a gusset, deep pockets and a little stretch"),
    _shelf("Clothing", "Knitwear", "KNT",
        "Cardigan|Crewneck Sweater|Turtleneck|Merino Pullover|Knit Vest|Quarter-Zip", (49, 159), _SIZED,
        "knitted from fine wool that does not itch"),
    _shelf("Footwear", "Hiking Boots", "BOT",
        "Mid Boot|Trail Boot|Winter Boot|Approach Shoe|Leather Hiker|Day Hiker", (95, 229),
        {"color": COLORS, "size": SHOE_SIZES}, "with a grippy sole and a waterproof lining"),
    _shelf("Footwear", "Running Shoes", "RUN",
        "Road Runner|Trail Runner|Tempo Shoe|Daily Trainer|Racing Flat|Track Spike", (79, 189),
        {"color": COLORS, "size": SHOE_SIZES}, "light, responsive and made for long distances"),
    _shelf("Footwear", "Slippers", "SLP",
        "Felt Slipper|Shearling Slipper|House Clog|Wool Slipper|Travel Slipper", (25, 85),
        {"color": COLORS[:5], "size": SHOE_SIZES}, "warm, quiet and with a sole for the garden path"),
    _shelf("Outdoor", "Tents", "TNT",
        "Two-Person Tent|Dome Tent|Ultralight Tent|Family Tent|Tarp Shelter|Bivy", (119, 549), _COLORED,
        "pitches in minutes and stands in wind"),
    _shelf("Outdoor", "Backpacks", "BPK",
        "Day Pack|Trekking Pack|Commuter Pack|Roll-Top Pack|Summit Pack|Hydration Pack", (59, 289),
        {"color": COLORS, "volume": VOLUMES}, "with a frame that carries the load on the hips", "volume"),
    _shelf("Outdoor", "Sleeping Bags", "SLB",
        "Down Bag|Synthetic Bag|Quilt|Summer Bag|Winter Bag|Bag Liner", (49, 399),
        {"color": COLORS[:5], "volume": VOLUMES[1:]}, "rated honestly and easy to dry", "volume"),
    _shelf("Outdoor", "Camp Kitchen", "CMP",
        "Gas Stove|Cook Set|Kettle|Camp Mug|Water Filter|Cutlery Set|Cooler", (15, 149), _COLORED,
        "compact, sturdy and simple to clean"),
    _shelf("Electronics", "Headphones", "HDP",
        "Wireless Headphones|Earbuds|Studio Headphones|Sport Earbuds|Kids Headphones", (39, 349), _COLORED,
        "with clear sound and a battery that lasts for days"),
    _shelf("Electronics", "Tablets", "TAB", "Tablet|Drawing Tablet|Reading Tablet|Kids Tablet|Mini Tablet",
        (129, 699), {"color": COLORS[:4], "storage": STORAGE},
        "with a matt screen that is easy on the eyes", "storage"),
    _shelf("Electronics", "Speakers", "SPK",
        "Bookshelf Speaker|Portable Speaker|Soundbar|Shower Speaker|Smart Speaker", (35, 399), _COLORED,
        "that fills a room without shouting"),
    _shelf("Electronics", "Smart Home", "SMH",
        "Thermostat|Doorbell|Light Strip|Smart Plug|Motion Sensor|Desk Lamp|Door Lock", (19, 249),
        {"color": COLORS[:3] + COLORS[6:7]}, "works on the local network, no account needed"),
    _shelf("Home", "Bedding", "BED",
        "Duvet Cover|Sheet Set|Wool Blanket|Quilted Throw|Mattress Topper|Down Duvet", (39, 319),
        {"color": COLORS[3:9], "size": BED_SIZES}, "woven tightly and washed soft", "size"),
    _shelf("Home", "Cookware", "COK",
        "Saucepan|Cast Iron Skillet|Dutch Oven|Wok|Roasting Pan|Stock Pot|Griddle", (29, 279),
        {"color": COLORS[:6], "volume": VOLUMES}, "heavy where it counts and safe in the oven", "volume"),
    _shelf("Home", "Tableware", "TBL",
        "Dinner Plate Set|Bowl Set|Glass Set|Carafe|Serving Board|Mug Set|Salad Bowl", (18, 129),
        {"color": COLORS[2:9]}, "made in small batches, no two quite alike"),
    _shelf("Home", "Lighting", "LGT", "Table Lamp|Floor Lamp|Pendant|Wall Sconce|Reading Lamp|Lantern",
        (29, 259), _COLORED, "gives warm light and dims without flicker"),
    _shelf("Home", "Candles", "CND", "Pillar Candle|Jar Candle|Beeswax Taper|Tea Light Box|Travel Candle",
        (12, 49), {"scent": SCENTS, "volume": VOLUMES}, "burns cleanly for an evening or thirty", "volume"),
    _shelf("Leisure", "Puzzles", "PZL",
        "Map Puzzle|Botanical Puzzle|City Puzzle|Night Sky Puzzle|Painting Puzzle", (16, 45),
        {"pieces": PIECES}, "cut precisely from thick recycled board", "pieces"),
    _shelf("Leisure", "Notebooks", "NTB",
        "Pocket Notebook|Sketchbook|Planner|Travel Journal|Desk Notebook", (11, 39),
        {"color": COLORS[:6], "paper": FORMATS}, "lies flat and takes fountain pen ink"),
    _shelf("Leisure", "Yoga", "YOG",
        "Yoga Mat|Cork Block|Bolster|Yoga Strap|Travel Mat|Meditation Cushion", (14, 119),
        {"color": COLORS[2:9]}, "grips when it gets warm and does not smell of rubber"),
    _shelf("Leisure", "Bicycle Gear", "BIK",
        "Helmet|Pannier|Frame Bag|Front Light|Floor Pump|Rain Cape|Saddle", (25, 189), _COLORED,
        "built for daily riders in all seasons"),
    _shelf("Leisure", "Board Games", "GAM",
        "Strategy Game|Card Game|Party Game|Cooperative Game|Travel Game", (15, 79),
        {"edition": (("first edition", "1ST"), ("deluxe edition", "DLX"))}, "learned in ten minutes",
        "edition"),
)

# (code, what it says, percent, cents off, minimum subtotal in cents, category, first day, last day, active)
COUPONS = (
    ("WELCOME10", "10% off a first order", 10, None, 0, None, "2024-07-01", "2026-12-31", True),
    ("SUMMER15", "15% off summer sale", 15, None, 5000, None, "2025-06-15", "2025-08-31", True),
    ("SUMMER24", "12% off summer sale", 12, None, 5000, None, "2024-07-01", "2024-08-31", True),
    ("FRIDAY25", "25% off Black Friday week", 25, None, 10000, None, "2025-11-24", "2025-12-01", True),
    ("JANUARY20", "20% off the January sale", 20, None, 8000, None, "2026-01-10", "2026-01-31", True),
    ("TAKE15", "$15 off orders from $90", None, 1500, 9000, None, "2025-09-01", "2026-03-31", True),
    ("BIG50", "$50 off orders from $300", None, 5000, 30000, None, "2025-01-01", "2026-06-30", True),
    ("BOOTS30", "30% off hiking boots", 30, None, 0, "Hiking Boots", "2026-01-01", "2026-02-28", True),
    ("COZYHOME", "15% off bedding", 15, None, 4000, "Bedding", "2025-10-01", "2026-01-31", True),
    ("READER5", "$5 off notebooks", None, 500, 1500, "Notebooks", "2025-03-01", "2026-12-31", True),
    ("SORRY20", "$20 apology coupon", None, 2000, 4000, None, "2025-01-01", "2026-12-31", True),
    ("VIP40", "40% off, withdrawn after a leak", 40, None, 0, None, "2025-10-01", "2026-12-31", False),
    ("SPRING26", "18% off spring preview", 18, None, 6000, None, "2026-03-01", "2026-04-30", True),
)

CARRIERS = (("Parcelway", "PW"), ("Northern Express", "NX"), ("CityRunner", "CR"))
HUBS = ("Reno, NV", "Memphis, TN", "Columbus, OH", "Newark, NJ", "Dallas, TX", "Kansas City, MO")

CANCEL_REASONS = ("no_longer_needed", "ordered_by_mistake", "found_cheaper", "arrives_too_late", "other")

RETURN_REASONS = {
    "no_longer_needed": 34.0,
    "wrong_size": 26.0,
    "not_as_described": 14.0,
    "defective": 12.0,
    "damaged_in_transit": 8.0,
    "wrong_item_sent": 6.0,
}

# category of a ticket → (subject, what the customer wrote, what the agent answered)
TICKETS = {
    "delivery": (
        ("Parcel has not moved for days", "Tracking has shown the same place since last week. Is it lost?",
            "I asked the carrier to trace the parcel. They answer within two business days."),
        ("Marked delivered, nothing here",
            "It says delivered but I looked everywhere, also at the neighbours'.",
            "Thank you for checking. I opened a claim with the carrier."),
        ("Can it arrive before the weekend?", "We leave on Saturday. Is there any way to speed this up?",
            "The parcel already left our warehouse, so the carrier's estimate stands."),
    ),
    "order": (
        ("Wrong colour chosen", "I clicked the wrong colour and only noticed in the confirmation mail.",
            "I can change that as long as the order is pending."),
        ("Invoice for my company", "Please send an invoice with our company name on it.",
            "The invoice is on its way to your mailbox."),
    ),
    "return": (
        ("How do I return one of two items?", "I want to keep one and send the other back.",
            "You can return single items within 30 days of delivery."),
        ("Refund still missing", "I sent this back weeks ago and see no refund on my statement.",
            "Refunds go out once the warehouse has checked the parcel in."),
    ),
    "payment": (
        ("Charged twice?", "My statement shows two charges from your store on the same day.",
            "One of them is the authorisation; it disappears in three to five days."),
        ("Card was replaced", "My bank sent a new card. What about my open order?",
            "You can name another payment method while the order is pending."),
    ),
    "product": (
        ("Does it run small?", "I am between two sizes. Which one should I take?",
            "Reviewers advise the larger one."),
        ("Zip broke after a week", "The zip came off. I would like a repair or a new one.",
            "I am sorry. A defective item can be exchanged free of charge within 30 days."),
    ),
    "account": (
        ("Please update my phone number", "I have a new number and can't find where to change it.",
            "Done, you will get a confirmation."),
        ("Close my account", "Please delete my data after the open order is done.",
            "I noted your wish; we close accounts once no order is open."),
    ),
}

DEPARTMENTS = tuple(dict.fromkeys(category.department for category in CATEGORIES))
