"""Templates of the prompt book, written for this project; data/book.py fills the braces in."""

TEMPLATES: dict[str, list[str]] = {
    "explain": [
        "Explain {topic} to someone who has never thought about it.",
        "Can you tell me {topic}? Keep it simple.",
        "Explain to a curious ten-year-old {topic}.",
        "In two short paragraphs, explain {topic}.",
        "Explain {topic}, using an analogy from the kitchen.",
        "Write a numbered, step-by-step explanation of {topic}.",
        "I was asked {topic} and could not answer. Help me.",
        "What do most people get wrong about {topic}?",
        "Explain {topic} and finish with one surprising fact.",
    ],
    "stem": [
        "Define {topic} and give two examples.",
        "Explain {topic} at the level of a first-year student.",
        "Describe a simple classroom activity that illustrates {topic}.",
        "Where does {topic} show up in everyday life?",
        "What questions about {topic} are researchers still working on?",
        "Write five quiz questions about {topic}, each with a short answer.",
        "Summarise {topic} in exactly three sentences.",
        "Which ideas should I know before I study {topic}, and why?",
    ],
    "humanities": [
        "Give a short introduction to {topic}.",
        "Why do people still argue about {topic}?",
        "Name three important facts or ideas connected with {topic} and discuss one of them.",
        "How would you teach {topic} to teenagers in a single lesson?",
        "Write an essay outline on {topic} with an introduction, three sections and a conclusion.",
        "Present two opposing views on {topic} and say which is more convincing.",
        "What can we learn today from {topic}?",
        "Write a short dialogue between two students who discuss {topic}.",
    ],
    "story": [
        "Write a short story about {topic}.",
        "Write the opening paragraph of a novel about {topic}.",
        "Tell a bedtime story about {topic}, with a gentle ending.",
        "Outline a short film in three acts about {topic}.",
        "Write a funny story of under 150 words about {topic}.",
        "Write a scene with much dialogue about {topic}.",
    ],
    "email": [
        "Write a polite email {topic}.",
        "Write a brief message, at most five sentences, {topic}.",
        "Draft a warm and informal email {topic}.",
        "Write a formal letter {topic}, with a subject line.",
    ],
    "article": [
        "Write a blog post about {topic}.",
        "Write the introduction to a magazine article on {topic}.",
        "Make an outline with headings for a guide to {topic}.",
        "Write a lively social media post about {topic}.",
        "Write three possible headlines for an article on {topic} and a summary for the best one.",
    ],
    "speech": [
        "Write a short speech for {topic}.",
        "Write an invitation to {topic}.",
        "Write a thank-you note to the people who helped with {topic}.",
        "Write a news item of one paragraph about {topic}.",
    ],
    "poem": [
        "Write a poem about {topic}.",
        "Write a haiku about {topic} and explain the image.",
        "Describe {topic} in one vivid paragraph, without using adjectives twice.",
        "Write four rhyming lines about {topic}.",
    ],
    "function": [
        "Write a Python function `{signature}`. {description}",
        "Implement this in Python and add three assertions as tests: `{signature}`. {description}",
        "I need a Python helper. {description} Its signature is `{signature}`, and `{call}` should "
        "give `{value}`. Show the code, then say in one sentence how it works.",
        "Give two different Python solutions for `{signature}` and compare them. {description}",
        "Please write `{signature}` in Python, with comments. {description} Mention edge cases.",
    ],
    "completion": [
        'Finish this Python function:\n\n```python\ndef {signature}:\n    """{description}\n\n'
        '    >>> {call}\n    {value}\n    """\n```',
        "Fill in the body of the function below; answer with code only.\n\n"
        'def {signature}:\n    """\n    {description}\n    Example: {call} == {value}\n    """\n',
    ],
    "concept": [
        "Explain {topic} in Python with a short example.",
        "What are typical mistakes with {topic} in Python?",
        "When should I use {topic} in a Python program, and when not?",
        "Give me a small Python exercise on {topic}, followed by its solution.",
        "Explain {topic} in Python to a programmer who knows only C.",
        "Write a short cheat sheet on {topic} for Python beginners.",
    ],
    "program": [
        "Write {topic} in Python.",
        "Describe how you would design {topic}, then write it in Python.",
        "Write {topic} in JavaScript and comment the main parts.",
        "List the functions and data structures needed for {topic}.",
    ],
    "query": [
        "Write an SQL query that returns {topic}. State the tables you assume.",
        "Using pandas, how do I get {topic}?",
        "Explain step by step how to find {topic} in a database.",
    ],
    "rewrite": [
        "Correct the grammar and spelling: {topic}",
        "Rewrite this sentence in a friendlier tone: {topic}",
        "Make this more formal: {topic}",
        "Shorten this as much as possible without losing its meaning: {topic}",
        "Rephrase this in three different ways: {topic}",
        "Turn this into a question: {topic}",
        "Rewrite the following in the future tense: {topic}",
        "Change this sentence so that a small child understands it: {topic}",
        "Rewrite this as a newspaper headline and a first sentence: {topic}",
        "Expand this sentence into a full paragraph: {topic}",
        "Rewrite this in the style of an old sailor: {topic}",
        "What could be clearer in this sentence? Suggest a better version: {topic}",
        "Translate this into French and then explain one word choice: {topic}",
        "Rewrite this sentence from the point of view of someone who disagrees: {topic}",
    ],
    "roleplay": [
        "Play the part of {topic}. Introduce yourself and describe your morning.",
        "You are {topic}. A stranger asks you for directions. Reply in character.",
        "Speak as {topic} and tell me about the best day of your life.",
        "Imagine being {topic}. Write a page of your diary.",
        "You are {topic} being interviewed for a local radio. What is your first answer?",
        "Stay in the voice of {topic} and give me advice on making a difficult choice.",
        "As {topic}, write a letter of complaint to your employer.",
        "Pretend that you are {topic} and explain what a smartphone is.",
        "Let us improvise: you are {topic}, I am your new apprentice. Begin the first lesson.",
        "You are {topic}. Tell me a secret, then ask me a question.",
        "Answer as {topic}: what are you most afraid of, and why?",
        "Write a short argument between {topic} and a tired tax inspector.",
    ],
    "list": [
        "List ten {topic}.",
        "Give me five {topic}, with one sentence about each.",
        "Make a table with two columns: {topic}, and why each one is good.",
        "What are the three best {topic}? Rank them.",
        "Suggest some unusual {topic}.",
        "Write a bulleted list of {topic} and mark the cheapest ones with a star.",
        "Brainstorm {topic}, grouped under three headings.",
        "I need {topic}. Give me seven short ideas and tell me which to try first.",
    ],
    "advice": [
        "{topic}. What should I do?",
        "{topic}. Give me a plan for the coming week.",
        "{topic}. What are my options, with advantages and drawbacks?",
        "{topic}. Ask me three questions that would help you to help me.",
        "A friend writes: '{topic}.' How could I answer kindly?",
        "{topic}. Suggest one small first step and explain why it helps.",
        "{topic}. What would you say if you were very direct?",
        "{topic}. Which mistakes should I avoid?",
    ],
}

FOLLOW_UPS: dict[str, list[str]] = {
    "explanation": [
        "Now say the same in a single sentence.",
        "Which part of that is the hardest to understand?",
        "Give me an example with numbers.",
    ],
    "writing": [
        "Make it half as long.",
        "Change the tone so that it sounds more hopeful.",
        "Write a different ending.",
        "Suggest a title and say why it fits.",
    ],
    "code": [
        "What is the running time of your solution?",
        "Add a docstring and type hints.",
        "Now write tests for it with pytest.",
        "How would you change it to handle very large inputs?",
    ],
    "math": [
        "Check the result in a second way.",
        "Now double every number in the question. What changes?",
        "Write a similar problem for me to practise.",
    ],
    "reasoning": ["How certain are you, and why?", "Explain your reasoning to a child."],
    "extraction": ["Now give the answer as JSON.", "Which details were missing from the note?"],
    "rewriting": ["Make it sound less stiff.", "What did you change, and why?"],
    "roleplay": [
        "Stay in character. What happened next?",
        "Now answer again, but in a bad mood.",
        "And what do you think of me?",
    ],
    "stem": [
        "Can you give a rough calculation to go with this?",
        "What would a sceptic say to that?",
        "Now turn the main points into a table.",
    ],
    "humanities": [
        "Which of these points is the weakest?",
        "How would someone from another culture see this?",
        "Suggest two books or works to explore next.",
    ],
    "lists": ["Add three more.", "Pick the best one and describe it in detail."],
    "advice": ["And if that does not work?", "Make that a checklist.", "What would that cost me?"],
}

MATH = [
    "{name} packs {ab} {item} into bags of {a}. How many bags are filled?",
    "{name} has {big} {item} and promised {a} to each of {c} friends. How many {item} are needed, "
    "and how many are left or missing?",
    "A box holds {a} rows of {b} {item}. How many {item} fit into {c} boxes?",
    "What is {percent} percent of {price}? Show the steps.",
    "A coat costs {price} euros. Its price falls by {percent} percent. What is the new price?",
    "{name} cycles {a} km every day for {b} days, then {c} km on the last day. How far is that?",
    "A train leaves {place} at {hour}:{minute} and travels for {a} hours and 25 minutes. When does "
    "it arrive?",
    "{name} earns {b} euros an hour and works {a} hours on {c} days. How much is earned in all?",
    "Three shelves carry {a}, {b} and {c} {item}. What is the mean number per shelf?",
    "Solve for x: {a}x + {b} = {abc_sum}. Explain each step.",
    "A rectangle is {a} cm wide and {b} cm long. Find its area and its perimeter.",
    "{name} is {low} years old and {other} is {high}. How old will each be when their ages add up "
    "to 150?",
    "Compute {big} * {c} - {ab} and show how you got there.",
    "A tank holds {abc} litres and loses {ab} litres every day. After how many days is it empty?",
    "{name} buys {a} {item} at {b} cents each and pays with a ten-euro note. What is the change?",
    "The ratio of {item} to {item2} is {a} to {b}. There are {bc} {item2}. How many {item} are "
    "there?",
    "A recipe for {a} people needs {ab} {item}. How many are needed for {c} people?",
    "Which is greater, {a}/{b} or {b}/{c}? Explain without a calculator.",
    "{name} reads {b} pages on {day} and {a} pages more on each following day. How many pages are "
    "read in five days?",
    "A bag contains {a} red and {b} blue {item}. One is drawn at random. How likely is it red?",
    "Find the least common multiple and the greatest common divisor of {ab} and {bc}.",
    "A car needs {a} litres for 100 km. How many litres are needed for {price} km?",
    "{name} saves {b} euros in the first month and doubles the amount every month. How much has "
    "been saved after {a} months?",
    "Convert {price} minutes into hours and minutes, then into seconds.",
    "From {big} {item}, {name} sells {a} and {other} buys {c} more. By how much has the number "
    "changed, and what is it now?",
    "Write {big} as a sum of powers of two and then in binary.",
    "A field of {abc} square metres is {a} metres wide. How long is it, and how long is its fence?",
    "Six numbers have a mean of {b}. Five of them add up to {ab}. What is the sixth? Could it be "
    "negative?",
    "A shop sold {big} tickets at {a} euros and {ab} tickets at {c} euros. Which kind brought in "
    "more money, and how much more?",
    "What are the next three terms of {a}, {abc_sum}, ... if the difference stays the same?",
]

REASONING = [
    "{name} is taller than {other}. {third} is shorter than {other}. Who is the tallest? Explain.",
    "{name}, {other} and {third} finished a race. {other} came before {third} but after {name}. "
    "In what order did they finish?",
    "All {item} in the blue box are old. This thing is old. Must it come from the blue box?",
    "If it rains in {place}, the market closes. The market is open. Is it raining in {place}?",
    "{name} says that {other} lies. {other} says that {third} lies. {third} says that both lie. "
    "Who tells the truth?",
    "A jar holds {a} green and {b} white {item}. How many must you take in the dark to be sure of "
    "two of one colour?",
    "{name} leaves {place} by train, {other} leaves {place2} an hour later by car. What else must "
    "I know to say where they meet?",
    "Today is {day}. What weekday will it be {big} days from now? Think step by step.",
    "Four people sit in a row: {name} is not next to {other}, {third} is at the left end, and "
    "{fourth} sits beside {third}. Give a possible order.",
    "{name} swapped {a} {item} for {b} {item2}, then half of those for {item3}. What can we say "
    "for certain about the {item} that remain?",
    "Find the pattern and continue: {a}, {ab}, {abc}, ...",
    "{name} found a wallet in {place} with {price} euros. List the reasons for and against keeping "
    "it, and decide.",
    "A shop in {place} sells more umbrellas and more soup in {month}. Does soup sell umbrellas? "
    "What else could explain it?",
    "{name} has two {item}, {other} has as many as {name} and {third} together, and {third} has "
    "{a}. How many has {other}?",
    "Is this argument valid? Every sailor can swim. {name} can swim. So {name} is a sailor.",
    "You must get a fox, a goose and {big} {item} over a river near {place}, two loads at a time. "
    "How would you plan the trips?",
    "{name} needs {a} minutes to paint a chair, {other} needs {b}. If they share the work on many "
    "chairs, who paints more, and by roughly what factor?",
    "Which does not belong, and why: {item}, {item2}, {place}, {item3}?",
    "{name} was born in {month} and {other} exactly {c} months later. In which month was {other} "
    "born?",
    "A lamp in {place} blinks every {a} seconds, another every {b} seconds. They blink together "
    "now. When do they next blink together?",
    "Suppose that nobody in {place} owned a clock. How would {name} and {other} manage to meet?",
    "{name} claims: 'I have seen {a} white swans near {place}, so all swans are white.' What is "
    "wrong with that?",
    "Put these in order of weight and say what you assume: one of the {item}, one of the {item2}, "
    "one of the {item3}.",
    "{name} has {percent} percent of the votes after {price} were counted of {bigger} hundred. Can "
    "we already name the winner?",
]

NOTES = [
    "Minutes, {day} {date} {month}: {name} (chair), {other} and {third} were present, {fourth} was "
    "ill. The budget of {price} euros was approved. {other} will order {big} {item} by Friday. The "
    "next meeting takes place in {place} at {hour}:{minute}.",
    "Hello, this is {name} from {place}. On {date} {month} I ordered {ab} {item} and {b} {item2} "
    "for {price} euros. Only {c} {item} came and one box was open. Please call me on 555-01{big}, "
    "best after {hour}:{minute}. Regards, {name}",
    "For sale: {big} used {item}, collected by {name} in {place} over {b} years. Some {item2} are "
    "included. Price {price} euros, or swap for {item3}. Viewing on {day} from {hour}:{minute}. "
    "Ask for {other}.",
    "We stayed {a} nights in {place} in {month}. The room cost {low} euros, breakfast {b} more. "
    "{name} at the desk was kind, but the lift was broken until {day}. The view over the harbour "
    "was the best part. I give it {c} out of 12. ({other})",
    "The {place} night walk starts on {day}, {date} {month}, at {hour}:{minute}, and leads over "
    "{a} km to {place2}. Guide: {name}. Adults pay {b} euros, children under {c} nothing. Bring a "
    "lamp. At most {low} people can join, and {other} keeps the list.",
    "Log: {hour}:{minute} door opened by {name}. Later {other} moved {ab} {item} to shelf {a} and "
    "{bc} {item2} to shelf {b}. {third} reported {c} broken {item3}. Alarm off on {day} by "
    "{fourth}, {place}.",
]

NOTE_TASKS = [
    "Extract all names of people from this text.",
    "List every number in the text and say what it counts.",
    "Return the people, places and dates below as JSON.",
    "Summarise this text in one sentence.",
    "Which actions are still open? Answer with a list.",
    "Put the key facts of this text into a Markdown table.",
    "Who is mentioned first and who last? When does it take place?",
    "Write three questions that this text answers, with the answers.",
]
