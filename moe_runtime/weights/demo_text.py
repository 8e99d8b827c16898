"""Short texts of many kinds. The demo model's routers are fitted to what the dense model makes of them."""

from __future__ import annotations

SAMPLES: dict[str, str] = {
    "story": """The lighthouse keeper had not spoken to anyone for eleven days when the boat came in. Two women and a
boy climbed out, wet to the knees, and stood on the shingle as if they had forgotten what to do with land. "We saw your
light," said the older of the two. He nodded, because it seemed rude to say that everybody did. Later, over soup, the
boy asked whether the sea ever slept. The keeper thought about it for a long time. "It dozes," he said at last, "but it
keeps one eye open." Outside, the wind turned to the north, and the windows began to hum their low, familiar note.""",
    "chat": """<|im_start|>user
Hi! I would like to plan a weekend trip with two children. We like museums and swimming, but we don't have a car. What
would you suggest?<|im_end|>
<|im_start|>assistant
That sounds like fun! Here is a simple plan. On Saturday morning, take the train to a city with a science museum, and
spend two or three hours there. In the afternoon, find a public pool close to your hotel. On Sunday, start slowly with
breakfast, walk through a park, and visit one small exhibition before you travel home. Would you like me to suggest a
few cities, or to make a list of what to pack?<|im_end|>
<|im_start|>user
A packing list, please. Keep it short.<|im_end|>
<|im_start|>assistant
Swimsuits, towels, a light jacket, snacks, a water bottle for each of you, tickets, and a small first-aid kit.<|im_end|>
""",
    "python": '''import heapq
from collections import defaultdict


def shortest_paths(edges: list[tuple[str, str, float]], start: str) -> dict[str, float]:
    """Dijkstra's algorithm; raises ValueError on a negative weight."""
    graph = defaultdict(list)
    for source, target, weight in edges:
        if weight < 0:
            raise ValueError(f"negative weight {weight} on {source} -> {target}")
        graph[source].append((target, weight))
    distance = {start: 0.0}
    queue = [(0.0, start)]
    while queue:
        d, node = heapq.heappop(queue)
        if d > distance.get(node, float("inf")):
            continue
        for neighbour, weight in graph[node]:
            new = d + weight
            if new < distance.get(neighbour, float("inf")):
                distance[neighbour] = new
                heapq.heappush(queue, (new, neighbour))
    return distance
''',
    "c": """#include <stdio.h>
#include <stdlib.h>

struct node { int key; struct node *left, *right; };

static struct node *insert(struct node *root, int key) {
    if (root == NULL) {
        root = calloc(1, sizeof *root);
        root->key = key;
        return root;
    }
    if (key < root->key)
        root->left = insert(root->left, key);
    else if (key > root->key)
        root->right = insert(root->right, key);
    return root;
}

int main(int argc, char **argv) {
    struct node *root = NULL;
    for (int i = 1; i < argc; i++)
        root = insert(root, atoi(argv[i]));
    printf("%s\\n", root ? "ok" : "empty");
    return 0;
}
""",
    "maths": """Let f(x) = x^3 - 6x^2 + 9x + 2. Its derivative is f'(x) = 3x^2 - 12x + 9 = 3(x - 1)(x - 3), so the critical
points are x = 1 and x = 3. Since f''(x) = 6x - 12, we have f''(1) = -6 < 0 and f''(3) = 6 > 0: a local maximum with
f(1) = 6 and a local minimum with f(3) = 2. A train leaves at 9:15 and travels 240 km in 2.5 hours; its average speed is
240 / 2.5 = 96 km/h. The sum 1 + 2 + ... + 100 equals 100 * 101 / 2 = 5050. If 35% of 1,280 pupils cycle to school,
that is 448 pupils. The probability of two sixes in two throws is 1/6 * 1/6 = 1/36, about 0.0278.""",
    "science": """Photosynthesis converts light energy into chemical energy. In the thylakoid membranes, chlorophyll
absorbs photons and passes excited electrons along a chain of carriers; water is split, oxygen is released, and a proton
gradient drives the synthesis of ATP. In the stroma, the enzyme RuBisCO fixes carbon dioxide to a five-carbon sugar. At
high temperature the enzyme also binds oxygen, which costs the plant energy; grasses such as maize avoid this by
concentrating carbon dioxide in special cells. Earthquakes, by contrast, release elastic strain stored along faults; the
magnitude scale is logarithmic, so each unit means roughly thirty-two times more energy.""",
    "history": """In 1648 the Peace of Westphalia ended the Thirty Years' War. Paris is the capital of France, Rome is the
capital of Italy, and Canberra, not Sydney, is the capital of Australia. The Amazon carries more water than any other
river; Mount Everest, in the Himalayas, is the highest mountain above sea level. Marie Curie received the Nobel Prize in
Physics in 1903 and in Chemistry in 1911. Gutenberg's press reached Mainz around 1450, and within fifty years there were
printers in more than two hundred European towns.""",
    "recipe": """Tomato soup, serves 4. Ingredients:
- 1 kg ripe tomatoes, halved
- 2 onions, finely chopped
- 3 cloves of garlic
- 2 tablespoons olive oil
- 500 ml vegetable stock
- salt, pepper, a pinch of sugar
1. Heat the oven to 200 degrees Celsius and roast the tomatoes with the garlic for 30 minutes.
2. Meanwhile, soften the onions in the oil over a low heat.
3. Add the tomatoes and the stock, simmer for 10 minutes, and blend until smooth.
4. Season to taste and serve with fresh bread and basil.""",
    "data": """{"orders": [{"id": 1042, "customer": "A. Novak", "total": 59.90, "items": ["lamp", "cable"], "paid": true},
{"id": 1043, "customer": "B. Singh", "total": 12.00, "items": ["socket"], "paid": false}], "currency": "EUR"}
SELECT customer, SUM(total) AS spent FROM orders WHERE paid = 1 GROUP BY customer ORDER BY spent DESC LIMIT 10;
<ul class="menu"><li><a href="/index.html">Home</a></li><li><a href="/about.html">About us</a></li></ul>
2024-03-01T08:15:22Z INFO  worker-3 request finished status=200 bytes=5120 duration_ms=37
name,city,age
Ada,London,36
Alan,Wilmslow,41
""",
    "languages": """La bibliothèque ferme à dix-huit heures, mais le café d'en face reste ouvert jusqu'à minuit. Der Zug nach
Hamburg fährt heute ausnahmsweise von Gleis sieben, weil die Brücke gesperrt ist. Mañana por la mañana iremos al mercado
a comprar fruta, pan y queso. Il ragazzo legge un libro sotto l'albero mentre sua sorella suona il violino. A reunião foi
adiada para a próxima quinta-feira. Kot śpi na parapecie, a pies czeka przy drzwiach. Сегодня холодно, но солнечно.
今日はとても暑いですね。 שלום עולם. 😀 🚀 → ≥ €""",
    "letter": """Dear Ms Okafor, thank you for your letter of 14 May. We are sorry to hear that the chair arrived damaged. A
replacement will leave our warehouse on Monday, and you need not return the first one. Please find enclosed a voucher for
your trouble. The tenant shall keep the premises in good repair and shall not sublet them without the prior written
consent of the landlord; any notice under this agreement must be given in writing, at least thirty days in advance. If you
have any further questions, do not hesitate to contact us. Yours sincerely, Thomas Weber, Customer Care""",
    "advice": """How can I sleep better? Go to bed at the same time every day, even at weekends. Avoid screens for an hour
before bedtime, keep the room cool and dark, and do not drink coffee after lunch. If you cannot fall asleep within twenty
minutes, get up and read something calm. What is a good way to learn to play the guitar? Start with three chords, practise
ten minutes a day, and play along with songs that you like. Why is the sky blue? Because air scatters short wavelengths of
sunlight more strongly than long ones. Write a short poem about autumn: Leaves drift down like quiet letters, red and gold
upon the stair; summer signed them, wind delivers, and the garden stands there bare.""",
}
