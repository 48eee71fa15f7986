"""Word lists of the prompt book: every entry was written for this project.

Entries are separated by a semicolon or a line break. data/book.py crosses them with templates.
"""

import re


def entries(text: str) -> list[str]:
    """Split a block of entries at semicolons and line breaks, without blanks."""
    return [part.strip() for part in re.split(r"[;\n]", text) if part.strip()]


EXPLAIN = entries("""
how a refrigerator keeps food cold; how a bicycle stays upright; how a microwave heats food
how a lighthouse lens throws light so far; how bread rises; how cheese is made from milk
how a key opens a pin lock; how a zip fastener holds two sides together; how glue sticks
how a touch screen senses a finger; how noise-cancelling headphones work; how a barcode is read
how a pressure cooker saves time; how a thermostat decides when to heat; how soap removes grease
how a sailing boat moves against the wind; how a submarine dives and surfaces; how a kite flies
how a canal lock lifts a boat; how a suspension bridge carries its load; how tunnels are dug
how a tree drinks water from the ground; how bees find their way home; how birds know where to fly
how a library arranges its books; how a post office sorts letters; how a parcel crosses the world
how a mortgage works; how compound interest grows savings; how inflation changes prices
how an insurance company sets a price; how a stock exchange matches buyers and sellers
how a credit score is worked out; how taxes pay for roads; how a currency gains or loses value
how a newspaper chooses its front page; how a bill becomes a law; how a jury reaches a verdict
how a patent protects an idea; how elections are counted; how a city plans its bus routes
how a search engine ranks pages; how e-mail travels between servers; how a website is loaded
how a password is stored safely; how two-factor sign-in works; how a video call stays in sync
how a computer stores a photograph; how file compression saves space; how a spell checker works
how a language model predicts the next word; how a recommendation list is made; how caching works
how satellite navigation finds a position; how a weather forecast is made; how radar sees rain
how a vaccine trains the body; how eyes adapt to darkness; how muscles grow with exercise
how sleep helps memory; how a fever fights infection; how wounds heal; how taste and smell combine
how a violin makes its sound; how a piano key moves a hammer; how film music guides emotion
how a camera focuses; how colour printing mixes ink; how a hologram appears solid
how glass is made; how paper is recycled; how steel differs from iron; how bricks are fired
how wind turbines make electricity; how a battery stores energy; how solar panels make power
how a dam controls a river; how sewage is cleaned; how drinking water reaches a tap
how coffee beans become a drink; how chocolate is tempered; how yoghurt sets; how pickling works
how chess ratings are computed; how a lottery sets its odds; how a sports league breaks ties
how a greenhouse keeps plants warm; how compost forms; how crop rotation helps soil
how an airport guides planes to the gate; how traffic lights are timed; how lifts choose floors
how a sewing machine ties its stitch; how a clock pendulum keeps time; how a compass points north
how tides follow the moon; how caves form; how sand dunes wander; how rivers cut valleys
how a rumour spreads; how habits are formed; how children learn to speak; how jokes work
how auctions set prices; how supermarkets place goods; how a queue can be made shorter
""")

STEM = entries("""
photosynthesis; the Doppler effect; plate tectonics; osmosis; natural selection; entropy; buoyancy
radioactive half-life; the greenhouse effect; electromagnetic induction; surface tension; friction
the water cycle; the nitrogen cycle; Newton's second law; conservation of momentum; refraction
standing waves; superconductivity; nuclear fusion; the periodic table; covalent bonds; catalysts
acid-base reactions; oxidation; polymers; crystal structure; chromatography; the ideal gas law
cell division; DNA replication; protein folding; enzymes; the immune system; genetic drift
food webs; symbiosis; antibiotic resistance; mitochondria; neurons; the carbon cycle; homeostasis
black holes; red giants; the phases of the moon; comets; exoplanets; cosmic background radiation
gravity assists; orbital resonance; tidal locking; the seasons; auroras; meteor showers
prime numbers; modular arithmetic; Bayes' rule; the central limit theorem; standard deviation
correlation and causation; logarithms; the Pythagorean theorem; complex numbers; matrices
eigenvectors; derivatives; integrals; differential equations; graph theory; combinatorics
Markov chains; game theory; fractals; the golden ratio; topology; probability distributions
binary search; hash tables; recursion; sorting algorithms; dynamic programming; neural networks
gradient descent; overfitting; public-key cryptography; error-correcting codes; data compression
operating systems; virtual memory; compilers; databases; version control; distributed consensus
transistors; operational amplifiers; digital filters; feedback control; heat exchangers; gears
hydraulics; stress and strain; aerodynamics; jet engines; electric motors; fuel cells; lasers
fibre optics; semiconductors; ultrasound imaging; magnetic resonance; X-ray diffraction; sonar
volcanoes; earthquakes; glaciers; ocean currents; monsoons; soil erosion; biodiversity; coral reefs
plant hormones; pollination; animal migration; camouflage; bird song; ant colonies; fungi; lichens
""")

HUMANITIES = entries("""
the Silk Road; the printing press; the Industrial Revolution; the Black Death; the Renaissance
the French Revolution; the fall of Constantinople; the Roman Republic; Athenian democracy
the Hanseatic League; the Mughal Empire; the Meiji Restoration; the Inca road system
the abolition of slavery; women's suffrage; decolonisation; the Cold War; the Marshall Plan
the Great Depression; the gold standard; mercantilism; feudalism; urbanisation; globalisation
the Enlightenment; stoicism; existentialism; utilitarianism; the social contract; scepticism
free will; personal identity; the problem of evil; the nature of beauty; moral relativism
virtue ethics; the trolley problem; the ship of Theseus; civil disobedience; human rights
Greek tragedy; the epic poem; the haiku; the sonnet; the gothic novel; magical realism; satire
the detective story; folk tales; travel writing; the essay; autobiography; science fiction
unreliable narrators; metaphor; irony; stream of consciousness; allegory; the tragic hero
Impressionism; Cubism; the Bauhaus; Baroque music; jazz; opera; shadow theatre; calligraphy
Gothic cathedrals; Brutalist architecture; cave paintings; portrait photography; silent film
cultural memory; oral history; nationalism; propaganda; censorship; the public sphere; tolerance
kinship; rites of passage; the gift economy; taboo; the history of childhood; migration
language death; loan words; writing systems; sign languages; dialects; translation; slang
the history of the calendar; the history of maps; the history of tea; the history of salt
supply and demand; monopoly; public goods; the tragedy of the commons; opportunity cost
unemployment; income inequality; central banks; trade tariffs; microcredit; behavioural economics
conformity; cognitive bias; attachment; motivation; group identity; leadership; stereotypes
universal basic income; compulsory voting; open borders; the separation of powers; federalism
""")

STORIES = entries("""
a clockmaker who repairs a watch that runs backwards; a lighthouse keeper who befriends a storm
a baker whose bread makes people tell the truth; two rivals stuck in a lift on New Year's Eve
a robot gardener on an abandoned space station; a girl who finds a door in an old oak
a postman delivering a letter forty years late; a village that loses the colour blue
a retired detective and a missing recipe book; a night train that stops at no known station
a fox that learns to read; a map that changes every morning; a choir that sings without a leader
a translator who understands only lies; a beekeeper in a city of glass; a haunted laundrette
an astronaut who receives her own message; a boy who collects lost shadows; a shy dragon
the last bookshop in a town by the sea; a chess game played by post for thirty years
a nurse who remembers every patient; a musician who hears a song before it is written
a ship's cook who saves the crew; a cartographer of dreams; a miner who finds a singing stone
a teacher's first day in a mountain school; a farmer who plants a forest; an honest thief
a grandmother who enters a video game contest; a museum guard who talks to portraits
a power cut that brings neighbours together; a runaway parade balloon; a tailor of invisible coats
a ferry pilot's final crossing; a cat who inherits a hotel; an inventor afraid of success
a wedding interrupted by snow; a radio station at the end of the world; a giant who is lonely
a student who swaps lives with her teacher; a detective who is afraid of the dark; a lost kite
a town where nobody can lie on Tuesdays; a painter who runs out of yellow; a polite burglar
a weather forecaster who is always wrong; a swimmer crossing a frozen lake; a secret staircase
""")

EMAILS = entries("""
asking a landlord to repair a broken boiler; inviting colleagues to a farewell lunch
thanking a mentor after a job offer; declining a meeting because of a deadline
asking a teacher for more time on an essay; reporting a billing mistake to a phone company
introducing a new team member; requesting a refund for a damaged lamp; cancelling a gym membership
announcing a change of office hours; asking for a reference letter; apologising for a late delivery
following up after a job interview; asking a neighbour to keep the noise down at night
proposing a weekly reading group; reminding volunteers about a beach clean-up
asking a supplier for a discount; congratulating a friend on a new baby; resigning from a job
requesting three days of leave; inviting parents to a school play; reporting a lost suitcase
asking a hotel about wheelchair access; offering to share a taxi to the airport
recommending a plumber to a friend; asking an editor to read a short story
explaining a delay in a software release; asking for feedback on a logo; thanking a donor
rescheduling a dentist appointment; asking a library to buy a book; welcoming a new customer
asking a colleague to review a budget; suggesting a quieter workspace; organising a charity run
asking a council to mend a street light; sharing notes from a workshop; returning a borrowed drill
requesting a vegetarian menu; asking a bank to close an account; inviting a guest to a podcast
""")

ARTICLES = entries("""
growing herbs on a windowsill; learning a language after fifty; cycling to work in winter
keeping a diary; repairing clothes at home; the joy of board games; walking a city at night
cooking for one person; starting a neighbourhood library; working from a small flat
saving money on groceries; the first year with a rescue dog; baking sourdough; camping with children
reading more books; learning the ukulele; watching birds from a balcony; making friends as an adult
volunteering at a food bank; travelling by slow train; writing letters by hand; digital detox
building a simple wooden shelf; painting with watercolours; running a first ten kilometres
meditation for busy people; choosing a second-hand bicycle; planning a vegetable garden
hosting a dinner on a small budget; the value of boredom; teaching teenagers about money
reducing plastic at home; keeping bees; learning to swim late in life; taking better photographs
the pleasures of public libraries; cooking with lentils; restoring old furniture; stargazing
making a family history; visiting small museums; living without a car; mending a friendship
""")

OCCASIONS = entries("""
a sister's wedding; a retirement party; the opening of a community garden; a school graduation
a football team's lost final; a charity auction; the launch of a small bakery; a farewell to a boss
a village fair; the first day of a summer camp; a book launch; an award for nurses
a hundredth birthday; a town's anniversary; a reunion of old classmates; a science fair
the naming of a ship; a housewarming; a tree-planting day; the end of a long project
a music contest; a volunteer evening; a new bridge; the birth of twins; a chess tournament
""")

POEM_SUBJECTS = entries("""
the first snow; an empty station; a grandmother's kitchen; the sound of rain on tin; a broken cup
autumn leaves; the sea at dawn; a sleeping city; lost gloves; an old dog; moving house; moonlight
a long queue; the smell of bread; a paper boat; silence; a crowded bus; spring mud; a lighthouse
forgetting a name; the last day of school; a garden gate; a telephone that never rings; fireflies
a night shift; the colour green; a borrowed book; a river in flood; morning coffee; distant thunder
""")

CHARACTERS = entries("""
a ship's captain in 1750; a medieval blacksmith; a grumpy wizard; a friendly robot librarian
an Antarctic researcher; a detective in a rainy city; a talking oak tree; a court jester
a deep-sea diver; a Roman baker; an alien tourist on Earth; a retired circus acrobat
a strict but kind piano teacher; a museum curator; a pirate who hates water; a mountain guide
a city mayor; a space-station engineer; a beekeeper; a ghost in an old theatre; a chess coach
a wise grandmother; a travelling merchant; an overworked barista; a dragon who collects teacups
a lighthouse keeper; a sports commentator; a train conductor; a mad inventor; a Viking navigator
a patient nurse; a newspaper editor in 1920; a tour guide on Mars; a sceptical scientist
a nervous first-time actor; a hotel concierge; a knight afraid of horses; a cheerful undertaker
a clock that can speak; a farmer during a drought; a diplomat at a difficult dinner; a moon goddess
a game-show host; a strict customs officer; an old sailor telling tales; a cat with strong opinions
a vampire who faints at blood; a judge in a cooking contest; a radio host at midnight; a stern tutor
""")

LIST_TOPICS = entries("""
rainy-day activities for children; gifts for someone who has everything; healthy office snacks
ways to save water at home; names for a sailing club; questions to ask a future flatmate
things to pack for a winter hike; ideas for a school science project; cheap weekend trips
icebreakers for a first meeting; hobbies that need no equipment; uses for old glass jars
ways to thank a volunteer; topics for a debate club; vegetables that grow in shade
signs that a plant needs water; safety rules for a workshop; reasons to learn chess
questions for interviewing a grandparent; ways to say no politely; mistakes new runners make
features of a good park; breakfast dishes without eggs; steps before buying a used car
items for a first-aid box; ways to remember names; exercises to do at a desk; good study habits
ideas for a street party; skills every traveller needs; ways to reuse paper; quiet party games
names for a bakery; themes for a costume party; jobs that involve animals; drinks without sugar
ways to cut food waste; arguments for a four-day week; tips for calling a helpline
books a classroom should have; sounds you hear in a forest; inventions that changed kitchens
ways to cool a room without a machine; tools for a beginner gardener; songs for a road trip game
questions to ask at a museum; warning signs of a scam; cheap ways to decorate a room
tasks to finish before a holiday; good manners on a train; ways to practise listening
indoor plants that survive neglect; foods that travel well; ways to cheer up a colleague
""")

ADVICE = entries("""
I keep waking up at four in the morning; my flatmate never washes the dishes
I have to give a talk next week and I am nervous; I spend too much time on my phone
my best friend has stopped answering messages; I cannot decide between two job offers
I want to learn to cook but burn everything; my garden is full of slugs; I feel stuck in my job
I always finish my work at the last minute; my teenager does not want to go to school
I lent money to a cousin and he has not paid it back; I am moving abroad in two months
my manager takes credit for my work; I want to run five kilometres but hate running
I forget the names of people I meet; my neighbour's dog barks all night; I want to read more
I need to save money for a bicycle; my presentations are too long; I get headaches at my desk
my plants keep dying; I am afraid of flying; I want to change my career at forty-five
my partner and I argue about housework; I have too many clothes; I am bad at small talk
I failed an important exam; I would like to write a novel but never start
my parents want me to study law and I prefer art; my savings lose value; I am new in this town
I cannot concentrate in an open-plan office; my child is a picky eater; I feel lonely on Sundays
I must tell a colleague that his work is poor; I drink too much coffee; I want a healthier lunch
my laptop is slow and I cannot afford a new one; I want to adopt a cat but I travel a lot
I have to plan a wedding on a tiny budget; I never stick to a routine; I am always late
I want to learn guitar without a teacher; I am worried about an ageing parent; my bike was stolen
I get angry in traffic; I want to volunteer but have little time; my team does not trust me
""")

SENTENCES = entries("""
The meeting was long and boring, and nobody said anything that was useful.
We regret that the shop will be closed on Monday because the floor has to be repaired.
Their going to send there documents to they're office tomorrow morning.
The cat sat by the window and watched the rain fall on the empty street.
Due to the fact that it was raining, the match was postponed until a later date.
I think maybe we could possibly try to start the project a little bit earlier next time.
The new policy, which was announced yesterday by the director, will affect all of the employees.
She dont like apples but her brother eat them every days.
The old bridge was built by hand in 1890 and it still carries trains across the valley.
Please be informed that your request has been received and is being processed by our staff.
He ran quick to the station, however he missed the train by one minutes.
Our product is the best product because it is better than other products on the market.
The soup was cold, the waiter was rude, and the bill was wrong, but the view was lovely.
If you have any questions do not hesitate to contact me at your earliest convenience.
The experiment failed since the temperature was not controlled, so we will repeat it in May.
Last summer my family and me goes to the lake, where we swimmed and eated ice cream.
A small leak in the roof had, over many years, ruined the piano in the hall.
It is what it is, and at the end of the day we have to move forward going forward.
The committee decided that a decision would be decided at the following meeting.
Tired after the climb, the hikers shared one orange and watched the sun go down.
The company's profits rose by four percent while its costs fell for the third year in a row.
Nobody had told the children that the circus would leave before the weekend.
You must not touch the machine while it is running or you may lose a finger.
The library gives free courses in the evening, which many people in the town do not know.
My phone broke so I could not call you, and I am sorry that you waited in the cold.
The river froze in January and the whole town came out to skate under paper lanterns.
In my opinion I personally believe that buses ought to be free for everyone.
The recipe asks for two eggs, a cup of flour, and more patience than I have.
Scientists found that the whales sing lower songs than they did sixty years ago.
The train which goes to the coast is the train that leaves from the second platform.
Everyone agreed the plan was good, but when the time came to pay nobody raised a hand.
There is many reason why people likes to live near of the sea.
The software update removes two old features and makes start-up about twice as fast.
Grandfather kept every ticket from every film he had ever seen in a blue tin box.
Your account will be suspended unless payment is received within ten working days.
The storm took the roof, the fence and the chickens, but left the washing on the line.
""")

NAMES = entries("""
Amara; Bjorn; Chiara; Deniz; Elif; Farid; Greta; Hugo; Ines; Jonas; Kavya; Liam; Mei; Noor; Otto
Priya; Quentin; Rosa; Samir; Tove; Ursula; Viktor; Wanda; Xenia; Yusuf; Zoe
""")

ITEMS = entries("""
marbles; postcards; apples; pencils; tickets; stamps; oranges; candles; notebooks; seashells
buttons; biscuits; tulips; magnets; stickers; walnuts; bricks; ribbons; eggs; lanterns
""")

PLACES = entries("""
Lisbon; Oslo; Nairobi; Kyoto; Quito; Tallinn; Marrakesh; Galway; Hanoi; Bergen; Porto; Krakow
""")

CODE_CONCEPTS = entries("""
list comprehensions; generators; decorators; context managers; dataclasses; exceptions; closures
type hints; virtual environments; unit tests; lambda functions; sets; default arguments; slicing
regular expressions; iterators; class inheritance; string formatting; mutable and immutable values
the difference between == and is; reading files; JSON parsing; sorting with a key; dictionaries
asynchronous functions; multiprocessing; logging; packages and imports; recursion limits; enums
""")

PROGRAMS = entries("""
a class for a bank account with deposit, withdraw and history; a command-line to-do list
a script that renames photographs by date; a stack with push, pop and peek; a queue with two stacks
a word-frequency counter for a text file; a tic-tac-toe game for two players; a simple calculator
a class that models a deck of cards; a timer that prints every second; a password generator
a script that finds duplicate files; a linked list with insert and delete; a temperature converter
a tiny address book stored in JSON; a number-guessing game; a text-based maze; a binary tree
a script that merges CSV files; a rate limiter; a least-recently-used cache; a priority queue
a matrix class with addition and multiplication; a hangman game; a class for fractions
a log-file analyser; a bag-of-words classifier; a currency table printer; a simple event system
a roman-numeral clock; a shopping cart with discounts; a seat-booking system; a parking meter
a retry helper with growing delays; an undo history for a text editor; a bingo card maker
""")

QUERIES = entries("""
the five customers with the highest total spending; all orders without a matching payment
the average mark of each class; books that were never borrowed; the newest row for each device
employees who earn more than their department's mean; the number of visits in each month
products whose stock fell below ten; pairs of users who share an address; the second-largest sale
rows with a missing e-mail address; the share of late deliveries for each carrier
""")
